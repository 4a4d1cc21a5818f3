"""The names of arguments and of what is returned, leaf by leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.runtime.aliases import aliases
from autopar.runtime.doors import flatten


class Model(nn.Module):
    def forward(self, ids: Any, pair: Any, *, mask: Any = None) -> Any: ...


def named(returned: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    leaves, spec = flatten(returned)
    return aliases(Model(), args, kwargs, spec, len(leaves))


def test_arguments_and_results_have_their_names() -> None:
    x = torch.zeros(1)
    found = named({"loss": x, "states": (x, {"last": x})}, x, (x, x), mask=x)
    assert found == {
        "input:0": "ids", "input:1": "pair.0", "input:2": "pair.1", "input:3": "mask",
        "output:0": "loss", "output:1": "states.0", "output:2": "states.1.last",
    }  # fmt: skip


def test_what_has_no_name_has_its_position() -> None:
    x = torch.zeros(1)
    assert named(x, x) == {"input:0": "ids"}
    assert named((x, x), x)["output:1"] == "1"
