"""The names of arguments and of what is returned, leaf by leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.driver.planning import aliases
from autopar.tracer import trace


class Model(nn.Module):
    def forward(self, ids: Any, pair: Any, *, mask: Any = None) -> Any: ...


class Returning(nn.Module):
    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(x)


def names(returned: Any) -> list[str]:
    return [leaf.name for leaf in trace(Returning(returned), (torch.zeros(1),)).outputs]


def test_arguments_have_their_names() -> None:
    x = torch.zeros(1)
    assert aliases(Model(), (x, (x, x)), {"mask": x}) == {
        "input:0": "ids", "input:1": "pair.0", "input:2": "pair.1", "input:3": "mask",
    }  # fmt: skip


def test_results_have_their_names_or_their_position() -> None:
    found = names(lambda x: {"loss": x.sum(), "states": (x + 1, {"last": x * 2}), "n": 3})
    assert found == ["loss", "states.0", "states.1.last", "n"]
    assert names(lambda x: (x + 1, x * 2)) == ["0", "1"]
    assert names(lambda x: x + 1) == ["0"]
