"""What a joint FX graph returns: items, each with its descriptor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx


def outputs_of(gm: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """The items of the output node and their descriptors."""
    output = gm.graph.output_node()
    return list(output.args[0]), list(output.meta["desc"])  # pyright: ignore[reportArgumentType]


def set_outputs(gm: fx.GraphModule, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Make these items, with their descriptors, what the graph returns."""
    output = gm.graph.output_node()
    kept = list(pairs)
    output.args = ([item for item, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]
