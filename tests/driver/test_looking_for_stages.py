"""Where stages are looked for: lines with gaps, starts that cannot be, thoughts that are off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.driver import segment_ways
from autopar.driver.pipeline_shapes import numbers_of_microbatches
from autopar.driver.pipelining import search_stages
from autopar.driver.search import search
from autopar.driver.segment_ways import SegmentWays
from autopar.plans.pipeline_orders import make_table
from autopar.plans.plan import Plan
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver.test_segments import Chain, asked, chain


def opened(graph: Any, devices: int, **options: Any) -> Plan:
    wanted = {"stages": "auto", "microbatches": "auto", **options}
    return search_stages(asked(graph, devices, **wanted), silent)


def in_one(graph: Any, devices: int, **options: Any) -> Plan:
    return search(asked(graph, devices, microbatches="auto", **options), silent)


@pytest.mark.parametrize(("layers", "devices"), [(4, 1), (2, 7), (1, 2)])
def test_where_no_number_of_stages_is_possible_there_is_one(layers: int, devices: int) -> None:
    assert not opened(chain(*[64] * (layers + 1)), devices).structure.stages


@pytest.mark.parametrize(("strategy", "stages"), [("fsdp", "auto"), ("ddp", 2)])
def test_where_a_microbatch_is_too_small_for_a_strategy_there_are_fewer(
    strategy: str, stages: int | str
) -> None:
    """Four for each of two ranks are all of a batch of eight."""
    plan = opened(chain(*[64] * 9), 4, strategy=strategy, stages=stages)
    assert plan.structure.schedule.microbatches < 8


def test_numbers_of_microbatches_that_have_no_order_are_left_out() -> None:
    """Interleaved on three ranks: 16 are not divided by five rounds."""
    graph = trace(Chain([64] * 13), (torch.randn(16, 64),), {}).graph
    wanted = asked(graph, 3, stages=6, microbatches="auto", schedule="interleaved")
    assert 16 not in numbers_of_microbatches(wanted, 3)
    assert search_stages(wanted, silent).structure.schedule.microbatches == 4


def test_one_stage_is_planned_where_plans_take_far_longer_than_thought() -> None:
    """Stages that were thought to fit do not, and those that do are slow."""
    graph = trace(Chain([32] * 7, 3), (torch.randn(1024, 32),), {}).graph
    peak = opened(graph, 2).estimates.memory.total
    tight = {"memory_limit": int(0.3 * peak)}
    found, plain = opened(graph, 2, **tight), in_one(graph, 2, **tight)
    assert found.estimates.step_ns <= plain.estimates.step_ns


class Summed(Chain):
    """A chain, and a sum over a table that no microbatch shares."""

    def __init__(self, rows: int) -> None:
        super().__init__([32] * 8, 3)
        self.table = nn.Linear(32, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh().tanh().tanh()
        return (x + self.table.weight.sum(0)).square().mean()


def test_one_stage_is_planned_in_any_number_of_microbatches() -> None:
    """Segments are thought to hold more than the whole does."""
    graph = trace(Summed(8_000), (torch.randn(1024, 32),), {}).graph
    tight = {"memory_limit": 8_000 * 32 * 8 + (1_000 << 10)}
    found, plain = opened(graph, 2, **tight), in_one(graph, 2, **tight)
    assert found.estimates.step_ns <= plain.estimates.step_ns


def test_once_one_stage_is_planned_pipelines_that_take_longer_are_left_out() -> None:
    """Links are fast: by what their busiest segments take alone they are known to be longer."""
    said: list[str] = []
    graph = trace(Chain([256] * 13), (torch.randn(4096, 256),), {}).graph
    plan = search_stages(asked(graph, 8, stages="auto", microbatches="auto"), said.append)
    assert not plan.structure.stages
    planned = said.index("solving for mesh dp=8")
    assert sum(": about " in text for text in said[:planned]) == 2
    assert not any(": about " in text for text in said[planned:])
    assert sum("no better" in text for text in said[planned:]) >= 4


def test_orders_share_plans_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved, stages hold more microbatches meanwhile, and take as long each."""
    graph = trace(Chain([32] * 9), (torch.randn(64, 32),), {}).graph
    known = SegmentWays(asked(graph, 4, stages="auto", microbatches=8), silent)
    plain, interleaved = (make_table("1f1b", 2, 8), make_table("interleaved", 2, 8, 2))
    first = known.divided(plain)
    solved: list[object] = []
    monkeypatch.setattr(segment_ways, "best_as_stated", lambda *_: solved.append(1))
    shared = known.divided(interleaved)
    assert not solved and first is not None and shared is not None
    monkeypatch.undo()
    alone = SegmentWays(known.asked, silent).divided(interleaved)
    assert alone == shared
