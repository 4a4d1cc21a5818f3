"""Passes over a local graph, each a function `graph -> graph` that leaves the order of what is sent
and awaited as the schedule has it. To add one, write it and enter it in `PASSES`."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.codegen.bias import fuse_bias
from autopar.codegen.tidy import drop_dead_code, tidy_views
from autopar.codegen.torch_private import boxed_codegen

_Pass = Callable[[fx.Graph], fx.Graph]


def box(graph: fx.Graph) -> fx.Graph:
    """The code takes its inputs as one list, which it clears."""
    graph.set_codegen(boxed_codegen())
    return graph


PASSES: tuple[_Pass, ...] = (
    drop_dead_code,
    tidy_views,
    fuse_bias,
    box,
)


def apply_passes(graph: fx.Graph) -> fx.Graph:
    """`graph` after every pass, checked."""
    for step in PASSES:
        graph = step(graph)
    graph.lint()
    return graph
