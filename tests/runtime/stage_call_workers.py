"""What the processes of `test_stages.py` do: calls of a model in stages other than the first."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from autopar.runtime.program.sharded import whole_of
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
    telling = Telling()
    made = staged(copy.deepcopy(telling), cuts="layers.1", microbatches=1)(*points())
    expected = telling(*points())
    assert made["size"].shape == ()
    found["number"] = distance(whole_of(made["size"]), expected["size"])
    found["beside it"] = distance(made["loss"], expected["loss"])
    shorter = Shorter()
    model = staged(copy.deepcopy(shorter), cuts="layers.2", microbatches=2)
    for each in (model, shorter):
        each(*points())["loss"].backward()
        each.eval()
    with torch.no_grad():
        found["shorter"] = distance(model(*points())["loss"], shorter(*points())["loss"])
    return found
