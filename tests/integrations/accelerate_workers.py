"""A loop with accelerate, for `test_scripts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integrations.trainer_workers import WORLD, Rows


class Labelled(Rows):
    """Rows without a column that is no argument of the model."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {name: row[name] for name in ("input_ids", "labels")}


def script(make: Callable[[], Any], folder: str) -> dict[str, Any]:
    """Six steps, the state saved after three; then three from there in another model; and the
    logits of an evaluation whose last batch is not full."""
    first = _Run(make)
    losses = first.train(3)
    first.accelerator.save_state(folder)
    losses += first.train(3, skip=3)
    second = _Run(make)
    second.accelerator.load_state(folder)
    again = second.train(3, skip=3)
    logits, labels = first.evaluate()
    return {
        "losses": losses,
        "resumed": again,
        "logits": logits.tolist(),
        "labels": labels.tolist(),
    }


class _Run:
    def __init__(self, make: Any) -> None:
        set_seed(3)
        self.accelerator = Accelerator(cpu=True)
        model: nn.Module = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6 * WORLD)
        loader = DataLoader(Labelled(24), 4 // WORLD)
        held_out = DataLoader(Labelled(10), 4 // WORLD)
        self.model, self.optimizer, self.schedule, self.loader, self.held_out = (
            self.accelerator.prepare(model, optimizer, schedule, loader, held_out)
        )

    def train(self, steps: int, skip: int = 0) -> list[tuple[float, float]]:
        """(loss, norm of the gradient before clipping) of each step."""
        seen: list[tuple[float, float]] = []
        self.model.train()
        for batch in list(self.loader)[skip : skip + steps]:
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            seen.append((loss.item(), float(norm)))
        return seen

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """The mean of |logits| of each row, and its labels, of all ranks' rows."""
        self.model.eval()
        found: list[tuple[Tensor, Tensor]] = []
        for batch in self.held_out:
            with torch.no_grad():
                logits = self.model(**batch).logits
            found.append(self.accelerator.gather_for_metrics((logits, batch["labels"])))
        logits = torch.cat([logits for logits, _ in found])
        return logits.abs().mean((1, 2)), torch.cat([labels for _, labels in found])
