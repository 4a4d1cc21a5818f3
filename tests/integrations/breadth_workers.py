"""More scripts with `Trainer`, for `test_breadth.py`: other models, dtypes and plans."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import autopar
from tests.integrations.trainer_workers import LENGTH, VOCAB, WORLD, Rows, gpt2, history


class Classes(Dataset[dict[str, Any]]):
    """Rows of tokens with padding, and a class of each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.ids = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        ids = self.ids[index] * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": int(ids.sum() % 3)}


def bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def padded_to_longest(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as collators of `transformers` make it: every rank pads to the longest of its own."""
    length = 8 if all(row["attention_mask"][8:].sum() == 0 for row in rows) else LENGTH
    return {
        key: torch.stack([torch.as_tensor(row[key])[:length] for row in rows])
        if key != "labels"
        else torch.tensor([row[key] for row in rows])
        for key in rows[0]
    }


CASES: dict[str, tuple[Callable[[], Any], type[Dataset[Any]], str | None, dict[str, Any]]] = {
    "GPT-2 in bfloat16": (gpt2, Rows, "fsdp", {"bf16": True}),
    "GPT-2 by megatron": (gpt2, Rows, "megatron", {"gradient_accumulation_steps": 3}),
    "GPT-2 by ddp with dropout": (lambda: gpt2(dropout=0.1), Rows, "ddp", {"max_grad_norm": 0.0}),
    "Llama as it is planned": (llama, Rows, None, {"optim": "adafactor"}),
    "BERT with classes": (bert, Classes, "fsdp", {"lr_scheduler_type": "cosine"}),
    "BERT, each rank pads to its longest": (bert, Classes, "fsdp", {"collator": padded_to_longest}),
}


def plain() -> dict[str, Any]:
    return {name: _train(*case, is_plain=True) for name, case in CASES.items()}


def compiled() -> dict[str, Any]:
    return {name: _train(*case) for name, case in CASES.items()}


def _train(
    make: Callable[[], Any],
    rows: Any,
    strategy: str | None,
    options: dict[str, Any],
    is_plain: bool = False,
) -> list[dict[str, float]]:
    options = dict(options)
    collator = options.pop("collator", None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=4, learning_rate=1e-3, seed=2, eval_strategy="steps",
            eval_steps=2, per_device_train_batch_size=4 // WORLD, save_strategy="no",
            per_device_eval_batch_size=4 // WORLD, logging_steps=1, report_to="none",
            disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True, **options,
        )  # fmt: skip
        model = make() if is_plain else autopar.compile(make(), constraints={"strategy": strategy})
        used = Trainer(
            model=model, args=arguments, train_dataset=rows(24), eval_dataset=rows(8),
            data_collator=collator,
        )  # fmt: skip
        used.train()
        return history(used)
