#!/usr/bin/env bash
# Gradient checkpointing changes what packed sequences see in transformers.
#
# Version: transformers 5.23.0, torch 2.13.0 (CPU).
# Behaviour: position_ids that start again tell transformers that a row holds several documents, and it masks
# each from the others, but only where it makes no key-value cache, which is made by default in training too.
# So with a configuration's default use_cache=True tokens of the second document attend to the first. With
# gradient checkpointing, which promises to save memory alone, no cache is made, and they do not: the loss is
# another. In eval() the same model sees across documents again.
# Seen:
#   by default the second document sees the first: True
#   with gradient checkpointing: False
#   with gradient checkpointing, in eval(): True
#   with use_cache=False: False
#   losses with and without gradient checkpointing are equal: False
# This script installs these versions in a temporary folder, runs them, and fails if any of that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==${1:-2.13.0}" "transformers==${2:-5.23.0}" "numpy>=2,<3"
"$folder/venv/bin/python" -W ignore - > "$folder/seen" 2> "$folder/errors" <<'PYTHON' || { cat "$folder/errors"; exit 1; }
import torch
from transformers import LlamaConfig, LlamaForCausalLM

positions = torch.cat([torch.arange(6), torch.arange(6)])[None]
first = torch.arange(12)[None]
other = torch.cat([first[:, :6] + 20, first[:, 6:]], 1)


def made(checkpointing: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64,
        )
    )
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def sees(model: LlamaForCausalLM, **more: bool) -> bool:
    """Whether the logits of the second document change with the tokens of the first."""
    logits = [model(input_ids=ids, position_ids=positions, **more).logits[:, 6:] for ids in (first, other)]
    return not torch.allclose(*logits, atol=1e-6)


print("by default the second document sees the first:", sees(made(False)))
print("with gradient checkpointing:", sees(made(True)))
print("with gradient checkpointing, in eval():", sees(made(True).eval()))
print("with use_cache=False:", sees(made(False), use_cache=False))
losses = [
    model(input_ids=first, labels=first, position_ids=positions).loss.item()
    for model in (made(False), made(True))
]
print("losses with and without gradient checkpointing are equal:", abs(losses[0] - losses[1]) < 1e-6)
PYTHON
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen" && echo "as it was"
