"""The step that is planned: with what backward makes again, with what is saved rounded if that is
asked for, and with its backward in two parts where a pipeline's schedule wants that."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.again import with_again, with_options
from autopar.ir.backward_parts import in_two_parts
from autopar.ir.graph import Graph, per_graph
from autopar.ir.rounding import with_rounding
from autopar.rules.rounding import exact_keys, roundable


def step_with(
    graph: Graph, again: Collection[str] | None, dtype: str, *, is_split: bool = False
) -> Graph:
    """`graph`, in which backward makes `again` what ops with these keys make, or may make all that
    can be if that is None, and activations of float32 are saved in `dtype` unless that is "".
    Backward comes in two parts if it `is_split`. ValueError if something cannot be made again."""
    step = _whole_step(graph, again, dtype)
    return in_two_parts(step) if is_split else step


def _whole_step(graph: Graph, again: Collection[str] | None, dtype: str) -> Graph:
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
