"""A script with `Trainer`, for `test_scripts.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORLD = int(os.environ["WORLD_SIZE"])
LENGTH, VOCAB = 16, 64


class Rows(Dataset[dict[str, Any]]):
    """Random tokens, of whose labels each row has another number, and a column that is no
    argument of the model."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.ids = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.ids[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.ids[index], "labels": labels, "note": 7}


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=LENGTH,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def accuracy(prediction: Any) -> dict[str, float]:
    guesses = prediction.predictions[:, :-1].argmax(-1)
    labels = prediction.label_ids[:, 1:]
    kept = labels != -100
    return {
        "accuracy": float((guesses == labels)[kept].mean()),
        "rows": float(len(labels)),
        "logits": float(np.abs(prediction.predictions).mean()),
    }


def trainer(model: Any, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder, learning_rate=1e-2, seed=1, per_device_train_batch_size=4 // WORLD,
        per_device_eval_batch_size=4 // WORLD, gradient_accumulation_steps=2, max_grad_norm=0.5,
        logging_steps=1, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        use_cpu=True, **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=Rows(24), eval_dataset=Rows(8),
        compute_metrics=accuracy,
    )  # fmt: skip


KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows")
KEPT += ("eval_logits", "train_loss", "step")


def history(used: Trainer) -> list[dict[str, float]]:
    return [{key: entry[key] for key in KEPT if key in entry} for entry in used.state.log_history]


def script(make: Callable[[], Any], folder: str) -> dict[str, Any]:
    """Trains, evaluates and saves; and goes on from the checkpoint in the middle."""
    options = {"max_steps": 6, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    first = trainer(make(), folder, **options, load_best_model_at_end=True)
    first.train()
    first.save_model()
    first.create_model_card(model_name="tiny")
    resumed = trainer(make(), folder, **options)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    saved = GPT2LMHeadModel.from_pretrained(folder)
    return {
        "history": history(first),
        "resumed": history(resumed),
        "card": "tiny" in Path(folder, "README.md").read_text(),
        "best": first.state.best_global_step,
        "saved": {name: p.double().norm().item() for name, p in saved.named_parameters()},
    }
