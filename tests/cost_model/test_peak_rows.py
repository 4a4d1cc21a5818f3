"""Rows of memory: what a problem says is held at a moment is held when the step is played."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model import step_simulation as bill
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.least_memory import (
    _least_saved,  # pyright: ignore[reportPrivateUsage]
    _results,  # pyright: ignore[reportPrivateUsage]
    least_after_forward,
    least_at_ops,
)
from autopar.cost_model.peak_rows import PeakRows
from autopar.cost_model.price import price
from autopar.cost_model.saved import Rounding, decision_key
from autopar.driver.search.shortage import smallest_memory
from autopar.ir.choices import ParamChoice, Saved
from autopar.ir.graph import Graph, Role
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import is_optional, is_result, original_key
from autopar.ir.peak_candidates import PeakCandidate, is_peak_candidate, peak_candidate_of
from autopar.ir.problem import Problem, Solution, Status
from autopar.ir.schedule import Compute
from autopar.ir.timeline import Timeline
from autopar.ir.uses import groups, is_saved
from autopar.plans.decisions import make_stage, resolved_request, same_choice
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver import evaluate, solve
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.memory import usages_at
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.codegen.models import case

MOMENTS = 40


def random_solution(problem: Problem, seed: int) -> Solution:
    """Of any cost, in which nothing is saved that backward does not read."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 10**6, len(c)) for c in problem.costs)
    stated = replace(problem, costs=costs, windows=(), usage_limit=None)
    found = Descent(stated, Evaluator(stated), Clock(None)).grown()
    if not evaluate(stated, found).feasible:
        found = solve(stated).choice
    choice, before = list(found), list[int]()
    for node, labels in enumerate(problem.labels):
        label = labels[choice[node]]
        # Where copies alone read a parameter in backward, it might be kept for none.
        if isinstance(label, ParamChoice) and "weights" in problem.keys[node]:
            choice[node] = labels.index(
                ParamChoice(label.storage, label.storage, label.num_on_host)
            )
    while choice != before:
        before = list(choice)
        for node, labels in enumerate(problem.labels):
            sinks = [s for flow in problem.flows if flow.source == node for s in flow.sinks]
            if Saved() in labels and all(s.state[choice[s.node]] < 0 for s in sinks):
                choice[node] = labels.index(Saved())
    return Solution(Status.FEASIBLE, tuple(choice), evaluate(problem, choice).arcs)


def held_at_ops(
    request: PlanRequest, problem: Problem, solution: Solution
) -> dict[PeakCandidate, int]:
    """What is held while each op is computed, when the step that a solution comes to is played."""
    settled = request
    if request.is_open:
        settled = resolved_request(request, problem, solution)
        plain = price(settled)
        choice = same_choice(problem, solution, plain, settled.step)
        found = evaluate(plain, choice)
        problem, solution = plain, replace(solution, choice=choice, arcs=found.arcs)
    timelines: list[Timeline] = []
    with pytest.MonkeyPatch.context() as patch:
        play = bill.simulate_events
        patch.setattr(
            bill, "simulate_events", lambda *args: timelines.append(play(*args)) or timelines[-1]
        )
        structure = make_stage(settled, problem, solution)
        memory = cost_breakdown(settled, structure).estimates.memory
    (played,) = timelines
    static = memory.params + memory.gradients + memory.optimizer + memory.accumulated
    return {
        peak_candidate_of(settled.step, event.node): static + sum(live)
        for event, live in zip(played.events, played.live, strict=True)
        if isinstance(event, Compute) and is_peak_candidate(settled.step, event.node)
    }


class Joined(nn.Module):
    """Weights that are one product's, or added up: their gradients are parts of one tensor, or one;
    and what it returns is held."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64)) for _ in range(4))
        self.v, self.w = (nn.Parameter(torch.randn(256, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ torch.cat([*self.weights], 1)
        z = (y.tanh() @ (self.v + self.w)).sin()
        return z.square().mean(), y


def graph_of(name: str) -> Graph:
    if name == "joined":
        return trace(Joined(), (torch.randn(32, 64),), {}).graph
    return case(name).traced.graph


@pytest.mark.breadth(7)
@pytest.mark.parametrize("residency", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("mesh", "is_open"), [("1", False), ("2", False), ("2x2", False), ("1", True), ("2", True)]
)
@pytest.mark.parametrize("name", ["shapes", "gpt2", "llama", "joined", "llama, 2 microbatches"])
def test_no_more_than_is_held(name: str, mesh: str, is_open: bool, residency: str) -> None:
    name, _, count = name.partition(", ")
    graph, cluster = graph_of(name), parse_cluster(f"{mesh}xH100")
    on_host = {"auto": "auto" if is_open else "cpu"}.get(residency, residency)
    asked = make_graph_request(
        graph, cluster, Options(PlanOptions(backend="eager"), mesh=mesh, residency=on_host)
    )
    laid = parse_mesh(mesh, cluster)
    if residency == "auto":
        # So that each module of a list is a block.
        laid = Mesh(tuple(replace(axis, bucket_bytes=1) for axis in laid))
    closed = replace(asked.on(laid), microbatches=2 if count else 1)
    least = {peak_candidate_of(closed.step, place): n for n, place in least_at_ops(closed)}
    request = closed.opened() if is_open else closed
    problem = price(request)
    for seed in range(2):
        solution = random_solution(problem, seed)
        held = held_at_ops(request, problem, solution)
        assert not least.keys() - held.keys()
        first = next(moment for moment in held if ":backward:" in moment.key)
        assert least_after_forward(closed.within(1)) <= held[first]
        assert [moment for moment, num_bytes in least.items() if num_bytes > held[moment]] == []
        peak_candidates = [*held]
        for moment in peak_candidates[seed :: 1 + len(peak_candidates) // MOMENTS]:
            row = PeakRows(request)(problem, {moment: 0})
            stated = sum(int(u[solution.choice[i]]) for i, u in usages_at(row, 1))
            assert stated <= held[moment], moment


def test_what_is_added_up_over_microbatches_counts_during_every_op() -> None:
    cluster = parse_cluster("2xH100")
    asked = make_graph_request(
        graph_of("llama"), cluster, Options(PlanOptions(backend="eager"), mesh="2")
    )
    request = replace(asked.on(parse_mesh("2", cluster)), microbatches=2)
    problem, rows = price(request), PeakRows(request)
    sums = {problem.keys.index(n.key) for n in request.step.nodes if is_result(n)}
    ops = [n.index for n in request.step.with_role(Role.OP) if not (n.view or is_result(n))]
    least = {node: int(problem.usages[node][0].amounts.min()) for node in sums}
    assert len(sums) > 10 and all(least.values())
    for place in filter(partial(is_peak_candidate, request.step), ops[:: len(ops) // 20]):
        moment = peak_candidate_of(request.step, place)
        row = dict(usages_at(rows(problem, {moment: 0}), 1))
        for node in sums:
            assert (row[node] == problem.usages[node][0].amounts).all()
        aside = dict(usages_at(rows(problem, {moment: 7}), 1))
        node = problem.keys.index(decision_key(request.step.nodes[place]))
        assert (aside[node] == row[node] + 7).all(), "the row that is known, and nothing else"


class Deep(nn.Module):
    """Activations that are large beside weights; of each layer one has to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_the_least_after_forward_is_near_what_the_solver_finds() -> None:
    graph = trace(Deep(), (torch.randn(8192, 32),), {}).graph
    cluster = parse_cluster("2x2xH100")
    asked = make_graph_request(graph, cluster, Options(PlanOptions(backend="eager"), mesh="2x2"))
    request = asked.on(parse_mesh("2x2", cluster))
    smallest = smallest_memory(request, silent)
    held = held_at_ops(smallest.request, smallest.problem, smallest.solution)
    first = next(moment for moment in held if ":backward:" in moment.key)
    saved = {group.root for group in groups(graph) if is_saved(graph, group)}
    everything = sum(graph.type_of(root).num_bytes for root in saved) // 4
    least = least_after_forward(request.within(1))
    assert held[first] // 2 <= least <= held[first]
    assert least < everything // 8


class Narrow(nn.Module):
    """A frozen product, its sum, and what is trained. Backward reads the product in one block of
    several."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read
        self.w, self.v = nn.Linear(64, 32, bias=False).requires_grad_(False), nn.Linear(1, 64)

    def forward(self, x: Tensor) -> Tensor:
        product = self.w(x)
        y = product.sum(-1, keepdim=True).sin()
        if self.is_read:
            y = y + product.cos().sum(-1, keepdim=True)
        return x + self.v(y)


class Uneven(nn.Module):
    """Blocks of a class, of which backward needs more in one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Narrow(is_read=number == 0) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("changed", [{}, {"microbatches": 2}, {"saved_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("model", [Deep, Uneven, Joined])
def test_no_choice_of_what_is_recomputed_saves_less_than_the_cut(
    model: type[nn.Module], changed: dict[str, Any]
) -> None:
    x = torch.randn(32, 32 if model is Deep else 64)
    graph, cluster = trace(model(), (x,), {}).graph, parse_cluster("2x2xH100")
    options = Options(PlanOptions(backend="eager"), mesh="2x2", **changed)
    request = make_graph_request(graph, cluster, options).on(parse_mesh("2x2", cluster))

    def saved(recomputed: frozenset[str]) -> int:
        closed = replace(request, recompute=recomputed)
        known = {root for root, _, _ in _results(closed.step)}
        roots = {each.root for each in groups(closed.step) if is_saved(closed.step, each)} - known
        return sum(Rounding(closed).saved_type(root).num_bytes for root in roots)

    opened, rng = request.opened(), np.random.default_rng(0)
    optional = [n for n in opened.step.nodes if is_optional(n) and not n.view]
    classes = sorted({original_key(node.key) for node in optional})
    least, chosen = saved(frozenset()), frozenset[str]()
    for _ in range(60):
        # The best so far with a few classes otherwise.
        tried = chosen ^ {*rng.choice(classes, rng.integers(1, 4)).tolist()} if classes else chosen
        num_bytes = saved(tried)
        assert _least_saved(opened) <= num_bytes
        if num_bytes < least:
            least, chosen = num_bytes, tried
    assert least <= 2 * _least_saved(opened)
