"""Blocks that execute alike are traced once, and what comes of it is what tracing all of them
gives; where they do not, all are traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from autopar import tracer
from autopar.errors import UnknownOpWarning
from autopar.rules.notation import Call, Rule
from autopar.rules.table import rule_for
from autopar.tracer import Traced, annotate, only_losses, trace
from autopar.tracer.find import find_runs
from autopar.tracer.watch import Watch
from tests.tracer.deep_models import DEPTH, SHORT, WIDTH, Block, Made, llama, plain, t5
from tests.tracer.misleading_models import WHOLE, all_hidden_states
from tests.zoo.cases import make_case, moved
from tests.zoo.equality import check_any_plan


def traced_whole(model: nn.Module, inputs: dict[str, Any]) -> Traced:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer, "find_runs", lambda *_: ())
        return trace(model, (), inputs)


def assert_equal(found: Traced, expected: Traced) -> None:
    """All but the names of nodes, which are given in the order in which they are made."""
    pairs = list(zip(found.graph.nodes, expected.graph.nodes, strict=True))
    for a, b in pairs:
        assert replace(a, name="") == replace(b, name="")
    assert found.graph.atoms == expected.graph.atoms
    found.graph.check()
    assert str(found.graph) == str(expected.graph)
    for field in ("inputs", "in_spec", "outputs", "out_spec", "tied"):
        assert getattr(found, field) == getattr(expected, field)
    assert _lines(found.gm) == _lines(expected.gm)
    assert [n.name for n in found.gm.graph.nodes][:-1] == [
        n.name for n in found.graph.nodes[: len(found.gm.graph.nodes) - 1]
    ]


def _lines(gm: fx.GraphModule) -> list[object]:
    """Every node of a graph with its place in the model, nodes by number."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    return [
        (
            node.op,
            node.target if node.op == "call_function" else node.meta.get("target"),
            repr(map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")),
            *(node.meta.get(key) for key in ("desc", "custom", "partitioner_tag")),
            repr(node.meta.get("val")),
        )
        for node in gm.graph.nodes
    ]


@pytest.mark.breadth(7)
@pytest.mark.parametrize("build", SHORT, ids=lambda build: build.__name__)
def test_a_short_trace_is_the_whole_one(build: Callable[[], Made]) -> None:
    model, inputs = build()
    runs = find_runs(model, (), inputs, only_losses, Watch(model))
    assert [(run.path, run.head, run.period) for run in runs] == SHORT[build]
    assert_equal(trace(model, (), inputs), traced_whole(model, inputs))


@pytest.mark.parametrize("build", WHOLE, ids=lambda build: build.__name__)
def test_blocks_that_differ_are_all_traced(build: Callable[[], Made]) -> None:
    model, inputs = build()
    assert not find_runs(model, (), inputs, only_losses, Watch(model))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("build", [llama, plain], ids=lambda build: build.__name__)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_a_short_trace_trains_as_eager_does(build: Callable[[], Made], sizes: tuple[int]) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    inputs = {k: torch.randn_like(x.double()) if k == "x" else x for k, x in inputs.items()}
    check_any_plan(make_case(moved(model), inputs), sizes, seed=0)


def test_the_model_comes_back_as_it_was() -> None:
    model, inputs = llama()
    before = dict(model.named_modules()), dict(model.state_dict(keep_vars=True))
    trace(model, (), inputs)
    assert dict(model.named_modules()) == before[0]
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is x for name, x in before[1].items()) and len(after) == len(before[1])


def test_what_a_model_remembers_comes_back_as_it_was() -> None:
    """`transformers` hooks its modules at the first call that asks for hidden states."""
    model, inputs = all_hidden_states()
    first = trace(model, (), inputs)
    assert_equal(trace(model, (), inputs), first)


def test_forward_alone() -> None:
    model, inputs = plain()
    with torch.no_grad():
        assert find_runs(model, (), inputs, only_losses, Watch(model))
        assert_equal(trace(model, (), inputs), traced_whole(model, inputs))


class Looks(Block):
    """Looks at data, which a step without data cannot tell."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.equal(torch.ones(2), torch.ones(2)) else 0)


def test_what_cannot_be_recorded_is_traced_whole() -> None:
    model = nn.Sequential(*(Looks() for _ in range(DEPTH)))
    inputs = {"input": torch.zeros(4, WIDTH)}
    assert not find_runs(model, (), inputs, only_losses, Watch(model))


def test_unknown_ops_are_counted_in_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule_for_others(call: Call) -> Rule | None:
        return None if "tanh.default" in call.op else rule_for(call)

    monkeypatch.setattr(annotate, "rule_for", rule_for_others)
    model, inputs = plain()
    with pytest.warns(UnknownOpWarning, match=f"tanh.default, used {DEPTH} times, first in module"):
        trace(model, (), inputs)


def test_two_halves_have_a_run_each() -> None:
    model, inputs = t5()
    runs = find_runs(model, (), inputs, only_losses, Watch(model))
    assert [(run.path, run.kept, run.extra) for run in runs] == [
        ("encoder.block", (0, 1, DEPTH - 2, DEPTH - 1), DEPTH - 4),
        ("decoder.block", (0, 1, DEPTH - 2, DEPTH - 1), DEPTH - 4),
    ]
