"""What ranks of a pipeline share at the end of a step: counted, priced and played."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.parts import axis_of_copies
from autopar.cost_model.sends import RESULTS, TIED
from autopar.driver.search.segments import SampledStep
from autopar.errors import PlanError
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.estimates import MicrobatchTimes, Shared
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import Plan
from autopar.plans.requests.policy import Policy
from autopar.tracer import trace
from tests.grouped import grouped
from tests.planned import hostless
from tests.redone import repriced
from tests.report.plans import staged_plan

WORDS, WIDTH = 256, 32


class Model(nn.Module):
    """A head that may be the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


IDS = torch.arange(8 * 16).reshape(8, 16)


def planned(*, tied: bool, cluster: str = "4xH100", **options: Any) -> Plan:
    return autopar.plan(
        Model(tied=tied), (IDS,), cluster=hostless(cluster), microbatches=4, **grouped(**options)
    )


def kinds(plan: Plan) -> dict[str, Shared]:
    return {each.kind: each for each in plan.estimates.shared}


def test_a_tied_weight_is_added_up_between_its_ranks() -> None:
    given: dict[str, Any] = {"stages": 4, "schedule": "1f1b"}
    apart, tied = planned(tied=False, **given), planned(tied=True, **given)
    assert kinds(apart).keys() == {RESULTS}
    assert kinds(apart)[RESULTS].ranks == (0, 1, 2, 3) and kinds(apart)[RESULTS].num_bytes == 4
    found = kinds(tied)[TIED]
    assert (found.ranks, found.count, found.num_bytes) == ((0, 3), 1, WORDS * WIDTH * 4)
    estimates, busiest_ns = tied.estimates, 0
    for stage in estimates.stages:
        busiest_ns = max(busiest_ns, stage.step_ns)
    own_ns = sum(each.time_ns for each in estimates.shared)
    assert estimates.step_ns == busiest_ns + estimates.bubble_ns + own_ns
    # Without what is shared, the ranks of both plans do about the same.
    table = tied.structure.actions
    bare_ns = simulate_pipeline(table, estimates.stages, estimates.delays, ()).step_ns
    assert estimates.step_ns == bare_ns + own_ns > bare_ns + found.time_ns > bare_ns


def test_stages_of_a_tied_weight_on_one_rank_share_nothing() -> None:
    """In a V, the first and the last stage are on the first rank."""
    plan = planned(tied=True, stages=4, schedule="zb-v", cluster="2xH100")
    assert plan.structure.actions.ranks[3] == 0
    assert kinds(plan).keys() == {RESULTS}


def test_segments_that_use_a_weight() -> None:
    tied, apart = (
        SampledStep(in_microbatches(trace(Model(tied=tied), (IDS,), {}).graph, 4), Policy())
        for tied in (True, False)
    )
    assert tied.tied == {"embed.weight": (0, len(tied.parts) - 1)}
    assert apart.tied == {}


def test_what_is_shared_waits_for_the_last_of_its_ranks() -> None:
    table = PipelineSchedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0")
    one = staged_plan().estimates.stages[0]
    stages = [
        msgspec.structs.replace(one, microbatch=MicrobatchTimes(10, 20, 10, 20, update))
        for update in (1, 2, 3)
    ]
    shared = (Shared("a", (0, 2), 1, 1, 100), Shared("b", (0, 1, 2), 1, 1, 1000))
    played = simulate_pipeline(table, stages, (), shared)
    # Forward until 30, backward until 50, 70 and 90 on ranks 2, 1 and 0.
    assert played.complete_ns == (90 + 1100,) * 3
    assert played.shared_ns == (1100, 1000, 1100)
    assert played.ends_ns == (1191, 1192, 1193) and played.step_ns == 1193
    first = simulate_pipeline(table, stages, (), shared[:1])
    assert first.complete_ns == (190, 70, 190) and first.ends_ns == (191, 72, 193)


@pytest.mark.parametrize(
    ("firsts", "link"),
    [((0, 24), 0), ((4, 8), 0), ((8, 12), 1), ((0, 8, 16), 0), ((0, 4), 1)],
    ids=str,
)
def test_copies_in_several_nodes_are_joined_by_the_network(
    firsts: tuple[int, ...], link: int
) -> None:
    cluster = parse_cluster("4x8xH100")
    axis = axis_of_copies(cluster, firsts)
    assert (axis.size, axis.crossed) == (len(firsts), cluster.levels[link].link)


@pytest.mark.parametrize("ranks", [(), (0, 2)], ids=str)
def test_ranks_that_a_plan_does_not_have_share_nothing(ranks: tuple[int, ...]) -> None:
    plan = staged_plan()
    wrong = (Shared("results", ranks, 1, 4, 1),)
    estimates = repriced(plan.estimates, shared=wrong)
    stored = msgspec.structs.replace(plan, estimates=estimates).to_bytes()
    with pytest.raises(PlanError, match="shared: results of ranks"):
        Plan.from_bytes(stored)
