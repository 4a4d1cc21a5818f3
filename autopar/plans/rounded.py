"""The step in which what is saved is rounded, if that is asked for."""

from __future__ import annotations

from autopar.ir.graph import Graph, per_graph
from autopar.ir.rounding import with_rounding
from autopar.rules.rounding import roundable


def with_saved_dtype(step: Graph, dtype: str) -> Graph:
    """`step`, in which activations of float32 are saved in `dtype`; itself if that is ""."""
    if not dtype:
        return step
    known = _made(step)
    if dtype not in known:
        known[dtype] = with_rounding(step, roundable(step), dtype)
    return known[dtype]


@per_graph
def _made(_: Graph) -> dict[str, Graph]:
    """The graphs that were made of a step."""
    return {}
