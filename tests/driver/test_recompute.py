"""What is recomputed for backward is decided with all else, where memory binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.cost_model.price import price
from autopar.errors import InfeasibleError
from autopar.ir.own_ops import is_copy, is_optional, original_key
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.problem import Problem, Status
from autopar.plans.decisions import resolved_request, same_choice
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.plans.structure import SavedDtype
from autopar.solver import evaluate, solve
from autopar.solver.evaluate import peak_usage
from autopar.solver.exact import WINDOWED_TOLERANCE
from autopar.solver.search import silent
from autopar.tracer import Traced, trace
from tests.codegen.models import case

LAYERS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(x).sin(), 0.1)


class Decided(nn.Module):
    """What decides is not rounded, whether it is recomputed or not; what comes of it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + torch.where(y > 0.1, y, 0.5 * y).sin()


class Joined(nn.Module):
    """Its output is saved, and read in backward by what is recomputed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.parts
        return first(x * 0.5) + second(x * 0.25) + third(x * 0.3)


class Averaged(Blocks):
    def __init__(self) -> None:
        super().__init__(Joined)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@cache
def traced(block: type[nn.Module] = Block) -> Traced:
    return trace(Blocks(block), (torch.randn(512, 64),), {})


def request(
    limit: int | None = None, mesh: str = "2", name: str = "", block: type[nn.Module] = Block
) -> PlanRequest:
    cluster = parse_cluster(f"{mesh}xH100")
    # Op by op: what is fused depends on what is recomputed.
    options = Options(PlanOptions(backend="eager"), mesh=mesh, memory_limit_bytes=limit)
    graph = (case(name).traced if name else traced(block)).graph
    return make_graph_request(graph, cluster, options).on(parse_mesh(mesh, cluster))


def candidates(block: type[nn.Module]) -> list[str]:
    nodes = with_recompute(traced(block).graph, None).nodes
    return sorted({original_key(node.key) for node in nodes if is_optional(node) and not node.view})


def subsets(block: type[nn.Module]) -> list[tuple[str, ...]]:
    known = candidates(block)
    return [keys for n in range(len(known) + 1) for keys in combinations(known, n)]


def held(problem: Problem, choice: Sequence[int]) -> int:
    return peak_usage(problem, choice)[0]


@pytest.mark.breadth(5)
@pytest.mark.parametrize("part", [0.5, 0.2])
@pytest.mark.parametrize("mesh", ["1", "2"])
@pytest.mark.parametrize(
    ("block", "dtype"), [(Block, ""), (Masked, ""), (Masked, "bfloat16"), (Decided, "bfloat16")]
)
def test_equal_to_the_best_of_all_that_can_be_made_again(
    block: type[nn.Module], dtype: SavedDtype, mesh: str, part: float
) -> None:
    asked = request(mesh=mesh, block=block)
    asked = replace(asked, options=replace(asked.options, saved_dtype=dtype))
    wanted = replace(asked, recompute=None)
    open_problem = price(wanted)
    plain = price(asked)
    roomy = solve(replace(plain, usage_limit=None))
    static = sum(int(usage.amounts.min()) for (usage,) in plain.usages)
    limit = static + int(part * (held(plain, roomy.choice) - static))
    costs: list[int] = []
    for keys in subsets(block):
        some = replace(price(replace(asked, recompute=keys)), usage_limit=limit)
        solution = solve(some)
        if solution.choice:
            # With windows a plan is good enough within such a part of the bound.
            assert solution.bound >= (1 - WINDOWED_TOLERANCE) * solution.objective
            costs.append(solution.objective)
    found = solve(replace(open_problem, usage_limit=limit))
    if not costs:
        assert found.status is Status.INFEASIBLE
        return
    assert found.status is Status.OPTIMAL
    assert found.objective == min(costs)
    settled = resolved_request(wanted, open_problem, found)
    again = price(settled)
    assert (
        evaluate(again, same_choice(open_problem, found, again, settled.step)).objective
        == found.objective
    )


def test_an_activation_is_rounded_that_only_recomputed_ops_read() -> None:
    """On one device, where its sharding has no axes."""
    graph = trace(Averaged(), (torch.randn(512, 64),), {}).graph
    options = Options(PlanOptions(backend="eager"), mesh="1", saved_dtype="bfloat16")
    cluster = parse_cluster("1xH100")
    asked = make_graph_request(graph, cluster, options).on(parse_mesh("1", cluster))
    asked = replace(asked, recompute=None)
    problem, plain = price(asked), price(replace(asked, recompute=()))
    static = sum(int(usage.amounts.min()) for (usage,) in plain.usages)
    top = held(plain, solve(replace(plain, usage_limit=None)).choice)
    found = solve(replace(problem, usage_limit=static + (top - static) // 2))
    resolved = resolved_request(asked, problem, found)
    again = price(resolved)
    assert any("restore." in key for key in again.keys)
    # The casts have a price here; while it is open what is recomputed, they have none.
    assert evaluate(again, same_choice(problem, found, again, resolved.step)).feasible


def test_nothing_is_made_again_where_all_fits() -> None:
    assert best_on(request(), silent).structure.recompute == ()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("name", "mesh"), [("", "2"), ("llama", "2")])
def test_a_plan_is_within_its_memory_and_no_longer_for_more(name: str, mesh: str) -> None:
    free = best_on(request(mesh=mesh, name=name), silent).estimates
    memory, steps = free.memory, [free.modelled_ns]
    for part in (0.8,) if name else (0.7, 0.4):
        limit = memory.total - int((1 - part) * memory.saved)
        try:
            found = best_on(request(limit, mesh, name), silent)
        except InfeasibleError as error:
            assert part < 0.6, error
            continue
        assert found.estimates.memory.total <= limit
        assert found.solution.bound <= found.solution.objective == found.estimates.modelled_ns
        steps.append(found.estimates.modelled_ns)
    assert steps == sorted(steps) and len(steps) > 1


def test_copies_are_no_work_of_the_model() -> None:
    free = best_on(request(), silent).estimates
    limit = free.memory.total - free.memory.saved // 2
    found = best_on(request(limit), silent)
    assert any(is_copy(node) for node in found.request.step.nodes)
    ratio = found.estimates.mfu_ppm / free.mfu_ppm
    assert ratio == pytest.approx(free.step_ns / found.estimates.step_ns, rel=1e-3)
