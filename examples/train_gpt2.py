"""Train a byte-level GPT-2 on the sources of Python's own standard library.

    python examples/train_gpt2.py                                  # one device
    torchrun --nproc-per-node 4 examples/train_gpt2.py             # four, same losses

One line is autopar's; the rest is what one would write for one device. Every rank is handed the
same global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

CONTEXT = 128
BATCH = 16


def model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def build():
    """For `autopar plan`: the model, and its inputs for a batch size."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (batch, CONTEXT))
        return {"input_ids": tokens, "labels": tokens}

    return model(), inputs


def text() -> torch.Tensor:
    """Two million bytes of the standard library, the same on every run."""
    library = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[: 2 << 20]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(num_steps: int):
    data = text()
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        starts = torch.randint(0, len(data) - CONTEXT, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + CONTEXT] for start in starts.tolist()])


def train(num_steps: int, plan: str | None) -> list[float]:
    torch.manual_seed(0)
    net = autopar.compile(model(), plan=plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses: list[float] = []
    console = Console(stderr=True)
    quiet = not console.is_terminal or int(os.environ.get("RANK", "0")) > 0
    with Progress(console=console, disable=quiet) as progress:
        task = progress.add_task("training", total=num_steps)
        for tokens in batches(num_steps):
            loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plan", help="a stored plan; without one, the first call makes it")
    parser.add_argument("--losses", type=Path, help="write the losses there, as JSON")
    args = parser.parse_args()
    losses = train(args.steps, args.plan)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps")
        if args.losses:
            args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
