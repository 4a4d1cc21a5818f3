"""What a model does with rows that ranks were handed, not as many on each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanMismatchError
from tests.grouped import grouped

WIDTH = 8


class Model(nn.Module):
    """Rows of two tensors, `edges` having a number of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(
        self, x: Tensor, mask: Tensor, edges: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        found = self.b(self.a(x).relu())
        loss = torch.where(mask[:, None], found, 0.0).square().mean()
        if edges is not None:
            loss = loss + self.a(edges).sin().mean()
        return loss, found


class Logits(Model):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.b(self.a(x).relu())


def batch(counts: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    """What each rank is handed, `counts` of rows."""
    torch.manual_seed(seed)
    x = torch.randn(sum(counts), WIDTH, dtype=torch.float64).split(list(counts))
    mask = (torch.rand(sum(counts)) > 0.3).split(list(counts))
    return [{"x": a, "mask": b} for a, b in zip(x, mask, strict=True)]


def step(model: Any, handed: list[dict[str, Tensor]]) -> dict[str, float]:
    """By how much outputs and gradients are off eager's, of the rows of all ranks as one batch."""
    eager = Model()
    whole = {name: torch.cat([each[name] for each in handed]) for name in handed[0]}
    expected, found = eager(**whole), model(**handed[dist.get_rank()])
    expected[0].backward()
    found[0].backward()
    pairs = [(model.a, eager.a), (model.b, eager.b)]
    grads = [(one.weight.grad, other.weight.grad) for one, other in pairs]
    off = {
        "loss": found[0] - expected[0],
        "output": found[1].detach() - _own(expected[1], handed),
        "grad": torch.stack([one.full_tensor() - other for one, other in grads]),
    }
    model.zero_grad()
    return {name: float(x.detach().abs().sum()) for name, x in off.items()}


def _own(whole: Tensor, handed: Sequence[dict[str, Tensor]]) -> Tensor:
    return whole.split([len(each["x"]) for each in handed])[dist.get_rank()]


class Sequences(nn.Module):
    """Outputs with the rows of the batch in several dims, and one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.a(x)
        return {
            "rows": found,
            "later": found.transpose(0, 1),
            "tokens": found.flatten(0, 1),
            "pooled": found.mean(1),
            "weights": self.a.weight.softmax(-1),
        }


def _mean_over_rows(found: dict[str, Tensor], x: Tensor) -> Tensor:
    """Losses outside of the model, with what a rank has of its own beside."""
    labels = x[..., 0].gt(0).long()
    steps = torch.arange(x.shape[1], dtype=x.dtype)
    contrast = F.normalize(found["pooled"], dim=-1) @ F.normalize(x.mean(1), dim=-1).T
    return (
        F.mse_loss(found["rows"], x)
        + F.cross_entropy(found["tokens"], labels.flatten())
        + found["rows"].log_softmax(-1).gather(-1, labels[..., None]).mean()
        + F.kl_div(found["rows"].log_softmax(-1), x.softmax(-1), reduction="batchmean")
        + (found["rows"] * F.one_hot(labels, WIDTH)).sum(-1).mean()
        + (found["later"].mean(-1) * steps[:, None]).mean()
        + found["rows"][torch.arange(len(x)), labels[:, 0] * 0].square().mean()
        + torch.stack([found["pooled"], x.mean(1)]).var(0).mean()
        + F.cross_entropy(contrast, torch.arange(len(x)))
        + found["weights"].square().mean()
    )


def losses_outside(counts: Sequence[int], **options: Any) -> dict[str, float]:
    """The gradient is that of the mean of the ranks' losses, each of its own rows."""
    torch.manual_seed(3)
    x = torch.randn(sum(counts), 3, WIDTH, dtype=torch.float64).split(list(counts))
    model: Any = autopar.compile(Sequences(), inputs="local", **grouped(**options))
    eager = Sequences()
    torch.stack([_mean_over_rows(eager(each), each) for each in x]).mean().backward()
    mine = x[dist.get_rank()]
    for _ in range(2):  # the second time with a program that has these gradients
        model.zero_grad()
        loss = _mean_over_rows(model(mine), mine)
        loss.backward()
    assert eager.a.weight.grad is not None
    return {
        "loss": float((loss - _mean_over_rows(eager(mine), mine)).detach().abs()),
        "grad": float((model.a.weight.grad.full_tensor() - eager.a.weight.grad).abs().max()),
    }


def outside() -> dict[str, dict[str, float]]:
    size = int(os.environ["WORLD_SIZE"])
    counts = {"even": [2] * size, "one row": [1] * size, "uneven": [3, *[2] * (size - 1)]}
    return {
        f"{how}, {name}": losses_outside(each, **options)
        for how, options in (
            ("free", {}), ("fsdp", {"strategy": "fsdp"}), ("shards", {"mesh": {"tp": size}}),
        )
        for name, each in counts.items()
        if how == "free" or name != "uneven"
    }  # fmt: skip


def uneven(size: int, **options: Any) -> dict[str, Any]:
    """Steps with uneven rows and even ones, in an order that has each kind of meeting."""
    model: Any = autopar.compile(Model(), inputs="local", **grouped(**options))
    counts = {
        "first": [3, 2], "even": [2, 2], "one has a program": [2, 1], "divides": [3, 1],
        "known": [3, 2], "one has none": [4, 0],
    }  # fmt: skip
    seen: dict[str, Any] = {
        name: step(model, batch(each[:size], k)) for k, (name, each) in enumerate(counts.items())
    }
    more = batch([3, 2], 7)
    for each, count in zip(more, [4, 7], strict=True):
        each["edges"] = torch.randn(count, WIDTH, dtype=torch.float64)
    seen["rows of two kinds"] = step(model, more)
    seen["programs"] = len(model.plans)
    return seen


def two() -> dict[str, Any]:
    return {name: uneven(2, **options) for name, options in OPTIONS.items()} | {"told": told()}


OPTIONS: dict[str, dict[str, Any]] = {
    "free": {},
    "shards": {"pins": {"a.weight": "S(0) on dp"}, "mesh": {"dp": 2}},
}


def told() -> dict[str, Any]:
    """Rows of other lengths: the error, and a step after it."""
    model: Any = autopar.compile(Model(), inputs="local")
    handed = batch([2, 2], 0)[dist.get_rank()]
    narrow = {**handed, "x": handed["x"][:, : WIDTH - dist.get_rank()]}
    errors: list[str] = []
    for known in (False, True):
        try:
            model(**narrow)
        except PlanMismatchError as error:
            errors.append(str(error))
        if not known:
            step(model, batch([2, 2], 0))
    return {"errors": errors, "after": step(model, batch([2, 2], 0))}


def accelerated() -> dict[str, float]:
    """A model that accelerate has prepared: own rows of outputs come back, and gradients are the
    mean over ranks of what each rank's loss gives."""
    from accelerate import Accelerator

    model: Any = Accelerator(cpu=True).prepare(autopar.compile(Logits()))
    eager, handed = Logits(), [each["x"] for each in batch([3, 2], 0)]
    losses = [F.mse_loss(eager(x), x) for x in handed]
    torch.stack(losses).mean().backward()
    mine = handed[dist.get_rank()]
    found = model(mine)
    F.mse_loss(found, mine).backward()
    assert eager.a.weight.grad is not None
    return {
        "output": float((found - eager(mine)).detach().abs().max()),
        "grad": float((model.a.weight.grad.full_tensor() - eager.a.weight.grad).abs().max()),
    }


class Causal(nn.Module):
    """A language model, as wide as the longest sequence is long, with an output of that width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 11, dtype=torch.float64)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        hidden = (self.table(input_ids) * attention_mask[..., None]).cumsum(1)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "pooled": hidden[:, -1]}


def metrics(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The share of tokens that are right and the mean entropy, of logits beside the labels and the
    mask that the model was called with, as trainers of language models log them."""
    labels, mask = batch["labels"][:, 1:], batch["attention_mask"]
    counted = labels != -100
    right = (logits[:, :-1].argmax(-1) == labels) & counted
    surprise = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return torch.stack([right.sum() / counted.sum(), (surprise * mask).sum() / mask.sum()])


def padded_by_rank() -> dict[str, Any]:
    """Sequences that each rank pads to its own longest, under accelerate."""
    from accelerate import Accelerator

    model: Any = Accelerator(cpu=True).prepare(autopar.compile(Causal()))
    eager = Causal()
    handed: list[dict[str, Tensor]] = []
    torch.manual_seed(3)
    for length in (4, 6):
        ids = torch.randint(0, 11, (2, length))
        mask = torch.arange(length) < torch.tensor([[length], [length - 1]])
        labels = torch.where(mask, ids, -100)
        handed.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    mine = handed[dist.get_rank()]
    found, expected = model(**mine), eager(**mine)
    seen = {
        "shape": list(found["logits"].shape),
        "pooled": list(found["pooled"].shape),
        "logits": float((found["logits"] - expected["logits"]).detach().abs().max()),
        "metrics": float(
            (metrics(found["logits"].detach(), mine) - metrics(expected["logits"].detach(), mine))
            .abs().max()
        ),
    }  # fmt: skip
    # Of a loss of its own, as DDP: the mean over ranks of what each gives.
    model(**mine)["logits"].square().mean().backward()
    torch.stack([eager(**each)["logits"].square().mean() for each in handed]).mean().backward()
    assert eager.head.weight.grad is not None
    grad = model.head.weight.grad.full_tensor() - eager.head.weight.grad
    return seen | {"grad": float(grad.abs().max())}
