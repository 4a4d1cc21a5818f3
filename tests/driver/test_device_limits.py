"""Stages that share a device share its memory as they need it, not evenly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.device_limits import plan_within_devices
from autopar.errors import InfeasibleError
from autopar.ir.pipeline import ActionTable
from autopar.plans.estimates import Memory
from autopar.plans.plan import Plan
from autopar.solver.search import silent
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
    return autopar.plan(model, x, cluster=hostless("2xH100"), memory_limit=limit, **HOW)


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


def within(most: Sequence[int], least: Sequence[int], limit: int) -> list[int]:
    """What stages 0 and 1 of one device hold, which have no use for more than `most` and need
    `least`, on a device with such a limit."""

    def planned(limits: Sequence[int]) -> list[Any]:
        for needed, given in zip(least, limits, strict=True):
            if given < needed:
                raise InfeasibleError("a stage has less than it needs")
        held = map(min, zip(most, limits, strict=True))
        return [SimpleNamespace(estimates=SimpleNamespace(memory=of(n))) for n in held]

    def of(total: int) -> Memory:
        return Memory(total, 0, 0, 0, 0, 0)

    def held(found: Sequence[Any]) -> list[Memory]:
        return [of(sum(each.estimates.memory.total for each in found))]

    table = ActionTable.parse("0F0 1F0 1B0 0B0")
    found = plan_within_devices(
        table, [limit], planned, held, lambda stage, _: least[stage], silent
    )
    return [each.estimates.memory.total for each in found]


def test_what_is_given_up_is_in_proportion_to_what_can_be() -> None:
    assert within([60, 30], [10, 10], 100) == [60, 30]
    assert within([60, 60], [10, 60], 100) == [40, 60]
    assert within([80, 40], [40, 20], 90) == [60, 30]
    assert within([90, 90], [70, 30], 100) == [70, 30]


def test_what_does_not_fit_together_is_said() -> None:
    with pytest.raises(
        InfeasibleError, match=r"stages 0, 1 share a device.* 101 B together, 1 B ov"
    ):
        within([90, 90], [70, 31], 100)
