"""Explanations against problems in which the alternative was fixed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.driver.explain.what_if import Explainer, make_explainer
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.problem import Status
from autopar.plans.explanation import Alternative, Benefit, Explanation
from autopar.plans.memory_refinement import Candidate
from autopar.plans.requests.constraints import Constraint
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.report.decisions import alternatives_text, benefits_text
from autopar.solver import solve
from autopar.solver.sensitivity import Sensitivity
from autopar.tracer import trace
from tests.graphs import linear_step
from tests.planned import hostless, pinned

CLUSTER = hostless("2x4xH100")
MESH = "2x4"
TIGHT = 15 << 20


@cache
def graph() -> Graph:
    return linear_step(256, 1024, 1024, layers=3)


def quiet(_: str) -> None:
    pass


def best(options: Options) -> Candidate:
    mesh = parse_mesh(options.mesh, CLUSTER)
    return best_on(make_graph_request(graph(), CLUSTER, options).on(mesh), quiet)


@cache
def roomy() -> Explainer:
    return make_explainer(make_graph_request(graph(), CLUSTER, Options(mesh=MESH)))


@cache
def tight() -> Explainer:
    return make_explainer(
        make_graph_request(graph(), CLUSTER, Options(mesh=MESH, memory_limit_bytes=TIGHT))
    )


def test_alternatives_of_a_parameter_cost_what_its_pins_cost() -> None:
    found = roomy().alternatives("w1", solves=100)
    (chosen,) = (each for each in found.alternatives if each.is_chosen)
    assert chosen.sharding == roomy().best.structure.params["w1"].storage
    assert chosen.modelled_ns == found.modelled_ns == roomy().best.estimates.modelled_ns
    assert len(found.alternatives) > 5
    for each in found.alternatives:
        pin = Constraint.parse(f"param:w1 = {each.sharding}", "a pin")
        pinned_plan = best(Options(mesh=MESH, constraints=(pin,)))
        assert each.status is Status.OPTIMAL
        assert each.modelled_ns == each.bound_ns == pinned_plan.solution.objective


def test_where_memory_binds_alternatives_keep_to_it() -> None:
    problem, found = tight().best.problem, tight().alternatives("w1", solves=100)
    labels = [str(each) for each in problem.labels[problem.keys.index("param:w1")]]
    assert {a.status for a in found.alternatives} >= {Status.OPTIMAL, Status.INFEASIBLE}
    for each in found.alternatives:
        storing = [text for text in labels if text.startswith(f"{each.sharding}|")]
        fixed = [solve(pinned(problem, {"param:w1": text})) for text in storing]
        fitting = [each.objective for each in fixed if each.choice]
        if each.status is Status.OPTIMAL:
            assert each.modelled_ns == min(fitting)
        elif each.modelled_ns is not None:
            assert each.bound_ns <= min(fitting) <= each.modelled_ns


@pytest.mark.breadth(2)
@pytest.mark.parametrize("key", ["forward.1", "dgrad.1", "saved:forward.0"])
def test_alternatives_of_a_decision_cost_what_a_solve_says(key: str) -> None:
    explainer = roomy()
    problem = explainer.best.problem
    found = explainer.alternatives(key, solves=100)
    assert sorted(a.sharding for a in found.alternatives) == sorted(
        map(str, problem.labels[problem.keys.index(key)])
    )
    assert [a.is_chosen for a in found.alternatives].count(True) == 1
    steps = [a.modelled_ns for a in found.alternatives]
    assert steps == sorted(steps) and steps[0] == found.modelled_ns
    for each in found.alternatives:
        fixed = solve(pinned(problem, {key.replace(".", r"\."): each.sharding}))
        assert each.modelled_ns == fixed.objective


def test_without_solves_alternatives_are_bounded() -> None:
    settled = asked = 0
    for key in ("param:w0", "forward.2", "wgrad.1"):
        exact = {a.sharding: a for a in roomy().alternatives(key, solves=1000).alternatives}
        for each in roomy().alternatives(key, solves=0).alternatives:
            modelled_ns = exact[each.sharding].modelled_ns
            assert modelled_ns is not None
            assert each.bound_ns <= modelled_ns
            assert each.modelled_ns is None or each.modelled_ns >= modelled_ns
            settled += each.status is Status.OPTIMAL
            asked += 1
    assert settled > 0.7 * asked


def test_without_a_relaxation_alternatives_are_solved_whole() -> None:
    whole = replace(roomy(), variations=None)
    exact = roomy().alternatives("w1", solves=100).alternatives
    assert whole.alternatives("w1", solves=100).alternatives == exact
    few = whole.alternatives("w1", solves=2).alternatives
    assert [a.status for a in few].count(Status.LIMIT) == len(few) - 3
    assert whole.more_memory().estimate_ns is None


def test_an_answer_does_not_depend_on_those_before() -> None:
    variations = Sensitivity(roomy().best.problem)
    asked = [
        {node: np.arange(len(labels)) == choice}
        for node, labels in enumerate(roomy().best.problem.labels)
        for choice in (0, len(labels) - 1)
    ]
    forwards = [variations.with_only(each) for each in asked]
    backwards = [variations.with_only(each) for each in reversed(asked)]
    assert forwards == backwards[::-1]


def test_inputs_are_fixed_where_they_are_used() -> None:
    found = roomy().alternatives("input:x", solves=100)
    problem = roomy().best.problem
    node = problem.keys.index("forward.0")
    flow = next(f for f in problem.flows if f.key == "input:x@forward")
    (sink,) = flow.sinks
    assert {a.sharding for a in found.alternatives} == {flow.states[s] for s in sink.state}
    for each in found.alternatives:
        asks = sink.state == flow.states.index(each.sharding)
        labels = [str(each) for each, ok in zip(problem.labels[node], asks, strict=True) if ok]
        steps = [solve(pinned(problem, {r"forward\.0": text})).objective for text in labels]
        assert each.modelled_ns == min(steps)


def gain_ns(found: Benefit) -> int:
    return found.before_ns - found.modelled_ns


def test_more_memory_never_costs_more_and_is_worth_something_where_it_binds() -> None:
    binding = [tight().more_memory(more) for more in (0, 1 << 20, 4 << 20, 1 << 30)]
    steps = [b.modelled_ns for b in binding]
    assert steps == sorted(steps, reverse=True)
    assert gain_ns(binding[0]) == 0 < gain_ns(binding[-1])
    assert binding[-1].modelled_ns == roomy().best.solution.objective
    assert all(b.estimate_ns is not None and b.estimate_ns <= b.modelled_ns for b in binding)
    assert gain_ns(roomy().more_memory()) == 0


@pytest.mark.parametrize("times", [2.0, 0.5])
def test_another_link_is_priced_anew(times: float) -> None:
    outer = CLUSTER.levels[0]
    link = replace(outer.link, bytes_per_s=times * outer.link.bytes_per_s)
    other = replace(CLUSTER, levels=(replace(outer, link=link), *CLUSTER.levels[1:]))
    request = make_graph_request(graph(), other, Options(mesh=MESH)).on(parse_mesh(MESH, other))
    wanted = best_on(request, quiet)
    for found in (roomy().faster_link(outer.link.name, times), roomy().faster_axis("dp", times)):
        assert found.estimate_ns is not None
        assert found.modelled_ns == wanted.solution.objective <= found.estimate_ns
        assert gain_ns(found) * (times - 1) >= 0
    inner = roomy().faster_axis("tp", times)
    assert gain_ns(inner) * (times - 1) > 0


def test_names_that_are_not_there() -> None:
    for question in (roomy().alternatives, roomy().faster_axis, roomy().faster_link):
        with pytest.raises(AutoparError, match=r"there is no .* 'nothing'"):
            question("nothing")


def test_modules_go_by_the_last_of_their_ops() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 32)))
    traced = trace(nn.Sequential(model), (torch.zeros(16, 32),), {})
    explainer = make_explainer(
        make_graph_request(traced.graph, parse_cluster("4xH100"), Options(mesh="4"))
    )
    outer, inner = explainer.alternatives("0.2"), explainer.alternatives("0.2.0")
    assert outer.alternatives == inner.alternatives
    assert {a.sharding for a in inner.alternatives} >= {"[R]", "[S(0)]", "[S(1)]"}
    assert explainer.alternatives("0.0").subject != inner.subject
    assert explainer.alternatives("0.0.weight").subject.startswith("0.0.weight")


def test_text() -> None:
    mesh = parse_mesh(MESH, CLUSTER)
    found = (
        Alternative("[S(0), S(1)]", True, 10**7, 10**7, Status.OPTIMAL),
        Alternative("[R, R]", False, 11 * 10**6, 11 * 10**6, Status.OPTIMAL),
        Alternative("[S(0), R]", False, 13 * 10**6, 12 * 10**6, Status.FEASIBLE),
        Alternative("[R, S(0)]", False, None, 12 * 10**6, Status.LIMIT),
        Alternative("[R, S(1)]", False, None, 10**7, Status.INFEASIBLE),
    )
    assert_expected_inline(
        alternatives_text(Explanation("w, as it is stored", mesh, 10**7, found))
        + benefits_text([Benefit("1 GiB more", 10**7, 8 * 10**6, 9 * 10**6, 9 * 10**6)]),
        """\
w, as it is stored: 10 ms as modelled
  [S(1) on tp, S(0) on dp]  10 ms  chosen
  replicated                11 ms  +1 ms (+10 %)
  [S(0) on dp]              13 ms  +3 ms (+30 %), at least +2 ms (+20 %)
  [S(0) on tp]              12 ms  at least +2 ms (+20 %)
  [S(1) on tp]                     does not fit in memory
now: 10 ms as modelled
  1 GiB more  9 ms  -1 ms (-10 %)  estimate 8 ms
""",
    )
