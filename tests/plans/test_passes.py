"""The passes that make a step: their order, what they keep, and that each graph is checked."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

from autopar.ir.graph import Graph, Ref
from autopar.ir.passes.stages import Cut
from autopar.plans import passes
from autopar.plans.passes import STEP_PASSES, GraphPass, StepForm, step_graph
from tests.codegen.models import case

FORM = StepForm(
    microbatches=2,
    cut=Cut(("model.layers.1",), 1),
    saved_dtype="bfloat16",
    recompute=None,
    is_split=True,
)


def test_fields_of_a_form_are_those_of_passes_in_their_order() -> None:
    fields = dict.fromkeys(each.field for each in STEP_PASSES)
    assert tuple(fields) == StepForm._fields


def test_a_step_without_a_form_is_the_graph() -> None:
    graph = case("llama").traced.graph
    assert step_graph(graph, StepForm()) is graph


def test_each_form_is_made_once() -> None:
    graph = replace(case("llama").traced.graph)
    found = step_graph(graph, FORM)
    assert step_graph(graph, FORM) is found
    assert step_graph(graph, FORM._replace(is_split=False)) is not found


def test_a_pass_that_changes_nothing_gives_the_graph() -> None:
    graph = replace(case("gpt2").traced.graph)
    two = step_graph(graph, StepForm(2))
    assert step_graph(two, StepForm(2)) is two


@pytest.mark.parametrize("number", range(len(STEP_PASSES)), ids=lambda n: STEP_PASSES[n].field)
def test_the_graph_of_each_pass_is_checked(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one of them gets wrong, its name is in the error."""
    right = STEP_PASSES[number]
    form = StepForm(loss_chunks=2) if right.field == "loss_chunks" else FORM

    def wrong(graph: Graph, wanted: Any) -> Graph:
        found = right.run(graph, wanted)
        *nodes, last = found.nodes
        misread = replace(last, inputs=(Ref(len(nodes)),))
        return replace(found, nodes=(*nodes, misread))

    wrong.__name__ = right.run.__name__
    broken = GraphPass(right.field, wrong)
    monkeypatch.setattr(
        passes, "STEP_PASSES", (*STEP_PASSES[:number], broken, *STEP_PASSES[number + 1 :])
    )
    with pytest.raises(ValueError, match=rf"{right.run.__name__}: node .* does not precede it"):
        step_graph(replace(case("llama").traced.graph), form)


def test_what_passes_made_ends_with_the_graph() -> None:
    graph = replace(case("gpt2").traced.graph)
    here = ref(graph)
    for form in (StepForm(2), StepForm(saved_dtype="float16"), StepForm(recompute=None)):
        step_graph(graph, form)
    step_graph(step_graph(graph, StepForm(2)), StepForm(2))
    del graph
    gc.collect()
    assert here() is None
