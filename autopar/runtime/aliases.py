"""What users call the inputs and outputs of a model, which graphs count by their position."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from autopar.runtime.doors import TreeSpec, flatten, unflatten


def aliases(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out_spec: TreeSpec,
    num_outputs: int,
) -> dict[str, str]:
    """{"input:0": "input_ids", "output:1": "logits"}, of a call of `model` and what it returned:
    the argument or key of each leaf, and the way into it where that holds several."""
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
    returned = unflatten(list(range(num_outputs)), out_spec)
    return found | {f"output:{leaf}": path for path, leaf in _paths(returned) if path}


def _paths(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """(path, leaf) of every number in nested mappings and sequences."""
    if isinstance(value, int):
        yield path, value
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        yield from _paths(inner, f"{path}.{key}" if path else str(key))
