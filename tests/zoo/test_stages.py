"""Steps in stages are steps: what eager makes of the whole batch, wherever the model is cut, under
any plan of each stage, in the order of any schedule."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.driver.search.segments import segments
from autopar.errors import MicrobatchError, StageError
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.pipeline import Pass, PipelineSchedule
from autopar.plans.pipeline_orders import IN_CHUNKS, SCHEDULES, STAGES_PER_RANK
from tests.zoo import ZOO, decoders
from tests.zoo.cases import ZooCase, moved, on_samples, trained, trained_on
from tests.zoo.staging import any_cuts, any_table, check_stages

DAILY = ("gpt2", "llama", "t5", "mixtral", "resnet")
MESHES = [(2,), (), (2, 2)]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "name",
    [*DAILY, *(pytest.param(n, marks=pytest.mark.nightly) for n in ZOO if n not in DAILY)],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_any_cuts_are_eager(name: str, microbatches: int) -> None:
    graph = trained(name).traced.graph
    try:
        turned = in_microbatches(graph, microbatches)
    except MicrobatchError:
        assert name in ("mixtral", "grouped", "resnet", "mobile", "sequence")
        return
    equal = 0
    for seed in range(4):
        count, schedule = 1 + seed % 3, ("gpipe", "1f1b")[seed % 2]
        try:
            check_stages(
                trained(name), any_cuts(turned, count, seed), microbatches, schedule, seed, MESHES
            )
        except StageError as error:
            # Some cuts leave a stage nothing but masks, or run through a batch norm.
            told = ("nothing to compute", "is changed by stage", "is made by stage")
            assert any(text in str(error) for text in told)
        else:
            equal += 1
    assert equal >= 2


@pytest.mark.breadth(5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "microbatches"), [("gpt2", 4), ("t5", 4), ("gemma", 4), ("unet", 2)]
)
def test_between_modules_in_every_schedule(name: str, microbatches: int, schedule: str) -> None:
    graph = in_microbatches(trained(name).traced.graph, microbatches)
    starts = [segment.start for segment in segments(graph)[1:]]
    check_stages(trained(name), starts[:3] or starts, microbatches, schedule, 1, MESHES)


LOOPED = """
0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0
1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0
"""
"""Looped breadth-first (arXiv:2211.05953), as torch's ScheduleLoopedBFS has it."""


@pytest.mark.parametrize(("name", "microbatches"), [("gpt2", 4), ("t5", 4), ("unet", 2)])
@pytest.mark.parametrize("order", ["looped", 1, 2])
def test_microbatches_in_any_order(name: str, microbatches: int, order: str | int) -> None:
    """Last ones first, or any, another one in each stage and phase, in one part and in two."""
    table = PipelineSchedule.parse(LOOPED).first(microbatches)
    if isinstance(order, int):
        table = any_table(table.ranks, microbatches, order, is_split=order % 2 == 0)
        backward = [[a.microbatch for a in row if a.kind is Pass.BACKWARD] for row in table.rows]
        assert any(row != sorted(row) for row in backward)
    graph = in_microbatches(trained(name).traced.graph, microbatches)
    starts = [segment.start for segment in segments(graph)[1:]]
    check_stages(trained(name), starts[:3], microbatches, table, 1, MESHES)


@cache
def unbalanced() -> ZooCase:
    """Mixtral without the loss that balances its experts, which is that of no microbatch."""
    torch.manual_seed(0)
    model, inputs = decoders.mixtral(balanced=False)
    return on_samples(8, moved(model), inputs)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(), (2,)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DAILY)
def test_every_model_on_ranks_in_every_schedule(
    name: str, ranks: int, microbatches: int, schedule: str, sizes: tuple[int, ...]
) -> None:
    """On one device each, and on two under any plan: data parallel, tensor parallel or mixed."""
    whole = unbalanced() if name == "mixtral" and microbatches > 1 else trained_on(8, name)
    if name == "resnet" and microbatches > 1:
        with pytest.raises(MicrobatchError, match="batch"):
            in_microbatches(whole.traced.graph, microbatches)
        return
    graph = in_microbatches(whole.traced.graph, microbatches)
    count = ranks * STAGES_PER_RANK.get(schedule, 2 if schedule in IN_CHUNKS else 1) - 1
    for seed in range(20):
        try:
            check_stages(whole, any_cuts(graph, count, seed), microbatches, schedule, seed, [sizes])
        except StageError as error:
            told = ("nothing to compute", "is changed by stage", "is made by stage")
            assert any(text in str(error) for text in told)
        else:
            return
    raise AssertionError(f"{name} was cut nowhere into {count + 1} stages")
