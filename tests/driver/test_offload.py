"""What is offloaded is decided with all else, where memory binds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import best_on
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.ir.mesh import Cluster
from autopar.ir.offloading import offloadable
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.problem import Problem, Status
from autopar.plans.decisions import make_stage, resolved_request, same_choice
from autopar.plans.provenance import PROVEN
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver import evaluate, solve
from autopar.solver.evaluate import peak_usage
from autopar.solver.search import silent
from autopar.tracer import Traced, trace
from tests.planned import on_h100

LAYERS, ROWS, WIDTH = 12, 16384, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def traced() -> Traced:
    with torch.device("meta"):
        return trace(Blocks(), (torch.empty(ROWS, WIDTH),), {})


def fast_host(cluster: Cluster, gb_per_s: float) -> Cluster:
    return replace(cluster, host=replace(cluster.host, bytes_per_s=gb_per_s * 1e9))


def request(gb_per_s: float, limit: int | None = None) -> PlanRequest:
    cluster, mesh = on_h100("2", 1)
    # Op by op: what is fused depends on what is recomputed.
    options = Options(PlanOptions(backend="eager"), mesh="2", memory_limit_bytes=limit)
    return make_graph_request(traced().graph, fast_host(cluster, gb_per_s), options).on(mesh)


def subsets(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return (found for n in range(len(keys) + 1) for found in combinations(sorted(keys), n))


def decided(gb_per_s: float) -> Iterator[PlanRequest]:
    """All that can be recomputed and offloaded."""
    plain = request(gb_per_s)
    nodes = with_recompute(plain.graph, None).nodes
    optional = {original_key(n.key) for n in nodes if is_optional(n) and not n.view}
    for again in subsets([*optional]):
        for away in subsets([*offloadable(with_recompute(plain.graph, again), plain.mesh)]):
            yield replace(plain, recompute=again, offloaded=away)


def held(problem: Problem, choice: Sequence[int]) -> int:
    return peak_usage(problem, choice)[0]


def stated(wanted: PlanRequest, limit: int | None, *, hides: bool) -> Problem:
    found = replace(price(wanted), usage_limit=limit)
    return found if hides else replace(found, windows=())


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("gb_per_s", "part", "hides"),
    [(27.7, 0.7, True), (1000.0, 0.7, True), (1000.0, 0.4, True), (1000.0, 0.4, False)],
)
def test_equal_to_the_best_of_all_that_can_be_done(
    gb_per_s: float, part: float, hides: bool
) -> None:
    """To the nanosecond where nothing hides, else within the tolerance of windows."""
    plain = price(request(gb_per_s))
    roomy = solve(replace(plain, usage_limit=None))
    fewest = [[int(u.amounts.min()) for (u,) in price(some).usages] for some in decided(gb_per_s)]
    least = min(map(sum, fewest))
    limit = least + int(part * (held(plain, roomy.choice) - least))
    every = [solve(stated(some, limit, hides=hides)) for some in decided(gb_per_s)]
    best = min((each for each in every if each.choice), key=lambda each: each.objective)
    wanted = replace(request(gb_per_s), recompute=None)
    open_problem = stated(wanted, limit, hides=hides)
    found = solve(open_problem)
    if hides:
        assert found.objective <= best.objective * (1 + 2 * PROVEN)
        assert found.bound <= best.objective
        assert min(each.bound for each in every if each.choice) <= found.objective
    else:
        assert found.status is best.status is Status.OPTIMAL
        assert found.objective == best.objective
    settled = resolved_request(wanted, open_problem, found)
    again = stated(settled, limit, hides=hides)
    choice = same_choice(open_problem, found, again, settled.step)
    final = evaluate(again, choice)
    assert final.objective == found.objective
    # Where copies take longer than a layer they are not offered.
    assert bool(settled.recompute) == (gb_per_s < 100) != bool(settled.offloaded)
    if hides:
        solution = replace(found, choice=choice, arcs=final.arcs, objective=final.objective)
        bill = cost_breakdown(settled, make_stage(settled, again, solution))
        assert bill.estimates.modelled_ns == found.objective


def test_a_plan_is_within_its_memory_and_offloads_where_the_host_is_near() -> None:
    free = best_on(request(1000.0), silent)
    assert free.structure.offloaded == ()
    memory = free.estimates.memory
    limit = memory.total - memory.saved // 2
    found = best_on(request(1000.0, limit), silent)
    assert found.structure.offloaded and found.structure.reload_pace
    assert found.estimates.memory.total <= limit
    assert found.solution.bound <= found.estimates.modelled_ns


def test_on_a_cpu_nothing_is_offered() -> None:
    """Its host has no other memory."""
    wanted = replace(request(1000.0), recompute=None)
    assert any("offloaded" in str(label) for labels in price(wanted).labels for label in labels)
    device = replace(wanted.cluster.device, kind="cpu")
    on_cpu = replace(wanted, cluster=replace(wanted.cluster, device=device))
    labels = [str(label) for labels in price(on_cpu).labels for label in labels]
    assert not any("offloaded" in label for label in labels)
