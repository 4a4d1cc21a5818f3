"""No plan that is chosen, or stored, is over the memory of a device, or its share of the host's, by
the rows of its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.compile import best_on
from autopar.cost_model.optimizer_kinds import find_kind
from autopar.errors import InfeasibleError
from autopar.ir.units import parse_bytes
from autopar.plans.memory_refinement import Candidate
from autopar.plans.plan import Plan
from autopar.report.costs import held_by, host_use
from autopar.report.summary import summarize
from autopar.solver.search import silent
from tests.planned import as_planned
from tests.zoo.test_memory import DAILY, EXPERTS, ZOO, request

ROOT = Path(__file__).resolve().parents[2]
STORED = sorted(
    path for folder in ("plans", "examples", "examples/ci_gate/plans")
    for path in (ROOT / folder).glob("*.plan.json")
)  # fmt: skip
MOST_OF_A_NODE = parse_bytes("2048GB")
"""What nodes of the devices that plans are stored for have at most."""


def check(plan: Plan) -> int:
    """What it has on the host of a device, by the rows of its page."""
    for number, part in enumerate(plan.stages):
        page = summarize(plan, number).stage
        assert page is not None
        host = host_use(part.estimates, plan)
        assert sum(held_by(page.memory).values()) <= page.memory_limit_bytes
        here = 0 if host is None else sum(row.num_bytes for row in host.rows)
        # The other rows of the page say the least that is there.
        params = sum(group.local_bytes for group in page.params if group.on_host)
        copies = 2 + find_kind(plan.structure.optimizer).states
        assert copies * params + page.offloaded_bytes <= here
    use = summarize(plan).host
    if use is None:
        return 0
    held = sum(row.num_bytes for row in use.rows)
    assert held <= use.limit_bytes and use.node_bytes <= use.devices * use.limit_bytes
    return held


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name.removesuffix(".plan.json"))
def test_a_stored_plan_is_within_memory(path: Path) -> None:
    assert check(Plan.load(path)) <= MOST_OF_A_NODE


def as_plan(found: Candidate) -> Plan:
    return as_planned(found.request, found.structure, found.estimates)


@pytest.mark.parametrize(
    "name",
    [
        *DAILY[:1],
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ZOO
            if name not in (*DAILY[:1], *EXPERTS)
        ),
    ],
)
def test_a_chosen_plan_is_within_memory(name: str) -> None:
    """With all parameters on the host, and where memory binds on both sides."""
    everything = best_on(request(name, "2", "cpu"), silent)
    on_host = check(as_plan(everything))
    assert on_host > 0
    peak = best_on(request(name, "2"), silent).estimates.memory.total
    for part in (0.9, 0.6):
        for share in (on_host, on_host // 3, 0):
            wanted = request(name, "2", "auto").within(int(part * peak), share)
            try:
                found = best_on(wanted, silent)
            except InfeasibleError:
                continue
            assert check(as_plan(found)) <= share
            assert sum(held_by(found.estimates.memory).values()) <= int(part * peak)
