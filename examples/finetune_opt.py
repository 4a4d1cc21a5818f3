"""Fine-tune OPT on the sources of Python's own standard library.

    python examples/finetune_opt.py                                    # one process
    torchrun --nproc-per-node 8 examples/finetune_opt.py               # eight, same losses
    torchrun --nproc-per-node 8 examples/finetune_opt.py --model opt-1.3b --save tuned

`--model` is a directory as `save_pretrained` writes it, or as it is downloaded from the hub
(config.json and safetensors); the model is made on the meta device, and each rank reads its shards
alone. Without it, a tiny OPT over bytes is initialised from a seed. Each rank loads its own rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import OPTConfig, OPTForCausalLM

import autopar

TINY = OPTConfig(
    vocab_size=256, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, dropout=0.0, layerdrop=0.0,
    pad_token_id=1, bos_token_id=2, eos_token_id=2, use_cache=False,
)  # fmt: skip


class Sources(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the standard library, as bytes: what a tokenizer's output would be."""

    def __init__(self, length: int) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        data = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[: 1 << 20]
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": piece, "labels": piece}


def finetune(args: argparse.Namespace) -> list[float]:
    config = OPTConfig.from_pretrained(args.model) if args.model else TINY
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    net = autopar.compile(model, inputs="local", plan=args.plan, weights=args.model, seed=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    loader = autopar.dataloader(
        Sources(args.length), args.batch, shuffle=True, drop_last=True, seed=1
    )
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in loader:
            loss = net(**batch).loss  # that of the whole batch, on every rank
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == args.steps:
                break
    if args.save:
        net.save_pretrained(args.save)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a directory with config.json and safetensors")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--plan", help="a stored plan; without one, the first call makes it")
    parser.add_argument("--save", help="a directory for the tuned model")
    parser.add_argument("--losses", type=Path, help="write the losses there, as JSON")
    args = parser.parse_args()
    losses = finetune(args)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps")
        if args.losses:
            args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
