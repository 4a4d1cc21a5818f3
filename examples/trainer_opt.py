"""The same with `transformers.Trainer`, which keeps its loop, its schedule and its logging.

    python examples/trainer_opt.py
    torchrun --nproc-per-node 2 examples/trainer_opt.py

Trainer gets the compiled model as it would get a plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from finetune_opt import TINY, Sources
from transformers import OPTForCausalLM, Trainer, TrainingArguments

import autopar


def train(steps: int, batch: int, folder: str) -> list[float]:
    with torch.device("meta"):
        model = OPTForCausalLM(TINY)
    net = autopar.compile(model, seed=0)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, learning_rate=1e-3, seed=1,
        per_device_train_batch_size=batch // int(os.environ.get("WORLD_SIZE", "1")),
        dataloader_drop_last=True, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model=net, args=arguments, train_dataset=Sources(64))
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--save", help="a directory for the trained model")
    parser.add_argument("--losses", type=Path, help="write the losses there, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = train(args.steps, args.batch, args.save or folder)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {len(losses)} steps")
        if args.losses:
            args.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
