"""What users call the inputs of a model, which graphs count by their position."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autopar.runtime.torch_private import flatten


def aliases(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """{"input:0": "input_ids"}, of a call of `model`: the argument of each leaf, and its number
    among those of an argument that holds several."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found: dict[str, str] = {}
    position = 0
    for key, value in [*enumerate(args), *kwargs.items()]:
        name = names[key] if isinstance(key, int) and key < len(names) else str(key)
        leaves = len(flatten(value)[0])
        for k in range(leaves):
            found[f"input:{position}"] = name if leaves == 1 else f"{name}.{k}"
            position += 1
    return found
