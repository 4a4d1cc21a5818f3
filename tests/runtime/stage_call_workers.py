"""What the processes of `test_stages.py` do: calls of a model in stages other than the first."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.program.sharded import whole_of
from tests.device import there
from tests.runtime.workers import batch, distance, llama, points, staged


class Telling(nn.Module):
    """Returns a number beside the loss, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.layers[1](self.layers[0](x))
        return {"loss": ((h - y) ** 2).mean(), "size": h.detach().abs().mean()}


class Shorter(nn.Module):
    """Leaves out layers in evaluation: here, what the second stage begins with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for k, layer in enumerate(self.layers):
            if self.training or k != 2:
                x = torch.tanh(layer(x))
        return {"loss": ((x - y) ** 2).mean()}


class TiedEnds(nn.Module):
    """The last layer is the first one, and a buffer counts calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        for layer in self.layers:
            x = torch.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return {"loss": ((x - y) ** 2).mean()}


def shared_at_end() -> dict[str, float]:
    """What is told that ranks share at the end of a step is what they do share."""
    model = staged(TiedEnds(), cuts="layers.1", microbatches=2)
    model(*points())["loss"].backward()
    seen: list[tuple[str, int]] = []

    def noting(kind: str, call: Any) -> Any:
        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append((kind, tensor.nbytes))
            return call(tensor, *args, **kwargs)

        return noted

    where = "autopar.runtime.program.pipelined.dist"
    with (
        patch(f"{where}.broadcast", noting("broadcast", dist.broadcast)),
        patch(f"{where}.all_reduce", noting("all_reduce", dist.all_reduce)),
    ):
        model(*points())["loss"].backward()
    (plan,) = model.plans
    told = {each.kind: (each.count, each.num_bytes) for each in plan.estimates.shared}
    found: dict[str, float] = {"kinds": abs(len(told) - 3)}
    for sent, kinds in (
        ("broadcast", ("results", "state of random numbers")),
        ("all_reduce", ("gradients of tied weights",)),
    ):
        done = [size for kind, size in seen if kind == sent]
        found[f"messages of {sent}"] = abs(len(done) - sum(told[kind][0] for kind in kinds))
        found[f"bytes of {sent}"] = abs(sum(done) - sum(told[kind][1] for kind in kinds))
    return found


def other_calls() -> dict[str, float]:
    """Evaluation of batches that microbatches do not divide, and a number from the last stage."""
    plain = llama()
    model = staged(copy.deepcopy(plain), microbatches=4)
    model(**batch(0)).loss.backward()
    found = {}
    with torch.no_grad():
        for size in (8, 5, 3):
            given = {name: x[:size] for name, x in batch(1).items()}
            found[f"loss of {size}"] = distance(model(**given).loss, plain(**given).loss)
    telling = there(Telling())
    made = staged(copy.deepcopy(telling), cuts="layers.1", microbatches=1)(*points())
    expected = telling(*points())
    assert made["size"].shape == ()
    found["number"] = distance(whole_of(made["size"]), expected["size"])
    found["beside it"] = distance(made["loss"], expected["loss"])
    shorter = there(Shorter())
    model = staged(copy.deepcopy(shorter), cuts="layers.2", microbatches=2)
    for each in (model, shorter):
        each(*points())["loss"].backward()
        each.eval()
    with torch.no_grad():
        found["shorter"] = distance(model(*points())["loss"], shorter(*points())["loss"])
    return found
