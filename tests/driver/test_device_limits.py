"""Stages that share a device share its memory as they need it, not evenly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.search.device_limits import DeviceSharing, SharedMemory
from autopar.errors import InfeasibleError
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.plan import Plan
from autopar.solver.search import silent
from tests.grouped import grouped
from tests.planned import hostless
from tests.zoo.test_stages import LOOPED

HOW: dict[str, Any] = {
    "cuts": ["up.1", "up.2", "up.3"], "schedule": LOOPED, "mesh": "1", "backend": "eager",
}  # fmt: skip


class Uneven(nn.Module):
    """The first half of four parts has small weights, the second large ones, so that the two stages
    of a device have little in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (8, 8, 256, 256)
        self.up = nn.ModuleList(nn.Linear(64, size) for size in sizes)
        self.down = nn.ModuleList(nn.Linear(size, 64) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            hidden = up(x)
            for _ in range(2):
                hidden = hidden.sin().cos()
            x = x + down(hidden)
        return x.square().mean()


@cache
def planned(limit: int | None = None) -> Plan:
    model, x = Uneven(), torch.randn(4096, 64)
    return autopar.plan(model, x, cluster=hostless("2xH100"), **grouped(memory_limit=limit, **HOW))


def totals(plan: Plan) -> list[int]:
    return [memory.total for memory in plan.estimates.devices]


@pytest.mark.parametrize("part", [1.0, 0.7])
def test_a_stage_has_what_another_one_leaves(part: float) -> None:
    """None of the large stages fits into half of a device, with all that can be recomputed; a small
    one takes a tenth."""
    limit = int(part * max(totals(planned())))
    found = planned(limit)
    assert max(totals(found)) <= limit
    own = [each.memory.total for each in found.estimates.stages]
    assert min(own[2:]) > 0.8 * limit and max(own[:2]) < 0.2 * limit
    assert found.estimates.memory.total == max(totals(found))
    assert found.estimates.memory_limit == limit
    assert {each.memory_limit for each in found.estimates.stages} == {limit}


def test_on_the_host_a_stage_has_what_another_one_leaves() -> None:
    """Parameters of a large stage take nine tenths of what their device has there."""
    given, how = (Uneven(), torch.randn(4096, 64)), {**HOW, "residency": "cpu"}
    free = autopar.plan(*given, cluster="2xH100", **grouped(**how))
    needed = free.estimates.host_bytes
    assert max(each.host_bytes for each in free.estimates.stages) > 0.9 * needed
    found = autopar.plan(*given, cluster="2xH100", **grouped(host_memory=f"{2 * needed}B", **how))
    assert found.estimates.host_bytes == needed == found.estimates.host_memory.limit
    assert found.estimates.step_ns == free.estimates.step_ns
    with pytest.raises(InfeasibleError, match="host"):
        autopar.plan(*given, cluster="2xH100", **grouped(host_memory=f"{2 * needed - 2}B", **how))


def within(
    most: Sequence[int], least: Sequence[int], limit: int, *, is_known: bool = True, rounds: int = 8
) -> list[int]:
    """What stages 0 and 1 of one device hold, which have no use for more than `most` and need
    `least`, on a device with such a limit; whether it `is_known` what they need."""

    def planned(limits: Sequence[Sequence[int]]) -> list[Any]:
        for needed, given in zip(least, limits[0], strict=True):
            if given < needed:
                raise InfeasibleError("a stage has less than it needs")
        return list(map(min, zip(most, limits[0], strict=True)))

    memory = SharedMemory(
        "memory limit", [limit], lambda found: [sum(map(int, cast("Any", found)))],
        lambda n: cast("int", n), (lambda stage, _: least[stage]) if is_known else None, "",
    )  # fmt: skip
    table = PipelineSchedule.parse("0F0 1F0 1B0 0B0")
    sharing = DeviceSharing(table, (memory,), silent, rounds)
    for given in sharing:
        try:
            plans = planned(given)
        except InfeasibleError as error:
            sharing.refuse(error)
        else:
            sharing.take(plans)
    return cast("list[Any]", sharing.plans)


def test_what_is_given_up_is_in_proportion_to_what_can_be() -> None:
    assert within([60, 30], [10, 10], 100) == [60, 30]
    assert within([60, 60], [10, 60], 100) == [40, 60]
    assert within([80, 40], [40, 20], 90) == [60, 30]
    assert within([90, 90], [70, 30], 100) == [70, 30]


def test_where_it_is_not_known_what_stages_need_they_have_as_much_in_the_end() -> None:
    """Of the host's memory: what is given up is in proportion to what they have."""
    assert within([60, 30], [10, 10], 100, is_known=False) == [60, 30]
    assert within([80, 40], [40, 20], 90, is_known=False) == [60, 30]
    assert within([60, 60], [50, 50], 100, is_known=False) == [50, 50]
    assert within([100, 40], [20, 40], 100, is_known=False) == [50, 40]
    with pytest.raises(InfeasibleError, match="less than it needs"):
        within([60, 60], [10, 60], 100, is_known=False)


def test_the_last_round_ends_with_what_is_wrong() -> None:
    """Though there would be as much for each stage still to try."""
    with pytest.raises(InfeasibleError, match="less than it needs"):
        within([90, 60], [50, 50], 100, is_known=False, rounds=2)


def test_what_does_not_fit_together_is_said() -> None:
    with pytest.raises(
        InfeasibleError, match=r"stages 0, 1 share a device.* 101 B together, 1 B ov"
    ):
        within([90, 90], [70, 31], 100)
