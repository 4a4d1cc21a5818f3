"""The planned step: the traced graph, changed by passes, one after the other.

Each pass takes a graph and returns another one, or the same if there is nothing to change. Its
docstring says what it leaves as it is. All that follows, prices, layouts, schedules and code,
treats the step as an ordinary graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, per_graph
from autopar.ir.passes.loss_chunks import in_loss_chunks
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.passes.rounding import with_rounding
from autopar.ir.passes.stages import Cut, in_two_parts, one_stage
from autopar.plans.structure import Stage
from autopar.rules.rounding import exact_keys, roundable


class StepForm(NamedTuple):
    """The arguments of the passes; each default leaves a graph as it is. `recompute` has the keys
    of ops that backward recomputes, None if that is to be decided: their copies are optional
    then."""

    microbatches: int = 1
    cut: Cut = Cut()
    loss_chunks: int = 1
    saved_dtype: str = ""
    recompute: frozenset[str] | None = frozenset()
    is_split: bool = False

    @staticmethod
    def of(stage: Stage) -> StepForm:
        """The form of a stage's graph under its decisions."""
        return StepForm(
            microbatches=stage.microbatches,
            loss_chunks=stage.loss_chunks,
            saved_dtype=stage.saved_dtype,
            recompute=frozenset(stage.recompute),
            is_split=stage.is_split,
        )


def with_saved_dtype(graph: Graph, dtype: str) -> Graph:
    """A pass: marks the ops whose activations may be saved in `dtype`, in a step that recomputes
    nothing. What is recomputed later does not change the marks. All else stays as it is."""
    refs = roundable(graph, exact_keys(with_recompute(graph, None)))
    marked = {ref.node for ref in refs}
    if not marked:
        return graph
    nodes = (replace(n, saved_dtype=dtype) if n.index in marked else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


class GraphPass(NamedTuple):
    """A change of a graph by a `field` of `StepForm`."""

    field: str
    run: Callable[[Graph, Any], Graph]


STEP_PASSES = (
    GraphPass("microbatches", in_microbatches),
    GraphPass("cut", one_stage),
    GraphPass("loss_chunks", in_loss_chunks),
    GraphPass("saved_dtype", with_saved_dtype),
    GraphPass("recompute", with_recompute),
    GraphPass("saved_dtype", with_rounding),
    GraphPass("is_split", in_two_parts),
)
"""All of them, in the order in which they run."""


def step_graph(graph: Graph, form: StepForm) -> Graph:
    """`graph` in that form; cached. MicrobatchError, StageError or LossChunksError if it cannot
    have the form, ValueError if something cannot be recomputed. ValueError, naming the pass, if the
    output of a pass is not well formed."""
    for each in STEP_PASSES:
        value = getattr(form, each.field)
        if value != StepForm._field_defaults[each.field]:
            graph = _after(graph, each, value)
    return graph


def _after(graph: Graph, change: GraphPass, value: Hashable) -> Graph:
    cache = _cache(graph)
    if (change, value) not in cache:
        output = change.run(graph, value)
        if output is not graph:
            _check(output, change)
        cache[change, value] = None if output is graph else output
    return cache[change, value] or graph


def _check(graph: Graph, change: GraphPass) -> None:
    try:
        graph.check()
    except ValueError as error:
        raise ValueError(f"{change.run.__name__}: {error}") from error


@per_graph
def _cache(_: Graph) -> dict[tuple[GraphPass, Hashable], Graph | None]:
    """Outputs of passes by graph. None stands for the graph itself, to which nothing may refer
    here."""
    return {}
