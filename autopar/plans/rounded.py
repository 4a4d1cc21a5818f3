"""The step in which what is saved is rounded, if that is asked for."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.again import with_again, with_options
from autopar.ir.graph import Graph, per_graph
from autopar.ir.rounding import with_rounding
from autopar.rules.rounding import exact_keys, roundable


def step_with(graph: Graph, again: Collection[str] | None, dtype: str) -> Graph:
    """`graph`, in which backward makes `again` what ops with these keys make, or may make all that
    can be if that is None, and activations of float32 are saved in `dtype` unless that is "".
    ValueError if something cannot be made again."""
    step = with_options(graph) if again is None else with_again(graph, again)
    if not dtype:
        return step
    known = _made(step)
    if dtype not in known:
        known[dtype] = with_rounding(step, roundable(step, kept_exact(graph)), dtype)
    return known[dtype]


def kept_exact(graph: Graph) -> frozenset[str]:
    """The keys of ops of `graph` whose results are not rounded, whatever is made again. That is the
    same for all plans, so that it is known before it is decided what is."""
    return exact_keys(with_options(graph))


@per_graph
def _made(_: Graph) -> dict[str, Graph]:
    """The graphs that were made of a step."""
    return {}
