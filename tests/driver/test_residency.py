"""Where parameters live is decided with all else, where memory binds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile import best_on
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.driver.explain.what_if import make_explainer
from autopar.errors import ArgumentError, AutoparError, InfeasibleError
from autopar.ir.mesh import Cluster
from autopar.ir.offloading import Hosting, can_be_on_host
from autopar.ir.problem import Problem
from autopar.plans.decisions import make_stage, resolved_request, same_choice
from autopar.plans.plan import Plan
from autopar.plans.provenance import PROVEN
from autopar.plans.recorded import options_of
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.report.cautions import cautions
from autopar.solver import evaluate, solve
from autopar.solver.evaluate import peak_usage
from autopar.solver.search import silent
from autopar.tracer import Traced, trace
from tests.planned import on_h100

LAYERS, ROWS, WIDTH = 4, 4096, 1024


class Stack(nn.Module):
    """Two classes of parameters, of which one has more to do than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.norms, *self.layers):
            x = x + layer(x).tanh()
        return x.square().mean()


@cache
def traced() -> Traced:
    with torch.device("meta"):
        return trace(Stack(), (torch.empty(ROWS, WIDTH),), {})


def near(cluster: Cluster, gb_per_s: float) -> Cluster:
    host = replace(cluster.host, bytes_per_s=gb_per_s * 1e9, memory_bytes_per_s=gb_per_s * 1e9)
    return replace(cluster, host=host)


def request(
    gb_per_s: float, limit: int | None = None, residency: str = "auto", mesh: str = "2"
) -> PlanRequest:
    cluster, laid = on_h100(mesh, 1)
    options = Options(
        PlanOptions(backend="eager"), mesh=mesh, memory_limit_bytes=limit, residency=residency
    )
    return make_graph_request(traced().graph, near(cluster, gb_per_s), options).on(laid)


def decided(gb_per_s: float) -> Iterator[PlanRequest]:
    """Every number of each class on the host."""
    plain = request(gb_per_s)
    first, second = can_be_on_host(plain.graph).values()
    for some in range(len(first) + 1):
        for others in range(len(second) + 1):
            chosen = (Hosting.of(first, {}).names(some), Hosting.of(second, {}).names(others))
            yield replace(plain, params_on_host=frozenset(chain.from_iterable(chosen)))


def test_what_is_known_of_some_is_so_in_all_choices() -> None:
    known = {"a": True, "d": False}
    hosting = Hosting.of(tuple("abcdef"), known)
    assert hosting.counts(8) == (1, 2, 3, 4, 5)
    for count in hosting.counts(8):
        names = hosting.names(count)
        assert len(set(names)) == count and "a" in names and "d" not in names
    assert Hosting.of(("d",), known).counts(8) == (0,)


def held(problem: Problem) -> int:
    return peak_usage(problem, solve(replace(problem, usage_limit=None)).choice)[0]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("gb_per_s", [27.7, 1000.0])
@pytest.mark.parametrize("part", [0.25, 0.6, 0.9])
def test_equal_to_the_best_of_all_that_can_be_done(gb_per_s: float, part: float) -> None:
    stated = [price(some) for some in decided(gb_per_s)]
    least, most = held(stated[-1]), held(stated[0])
    limit = least + int(part * (most - least))
    every = [solve(replace(problem, usage_limit=limit)) for problem in stated]
    best = min((each for each in every if each.choice), key=lambda each: each.objective)
    wanted = replace(request(gb_per_s), params_on_host=None)
    problem = replace(price(wanted), usage_limit=limit)
    found = solve(problem)
    assert found.objective <= best.objective * (1 + 2 * PROVEN)
    assert found.bound <= best.objective
    settled = replace(
        resolved_request(replace(wanted, recompute=None), problem, found),
        recompute=(),
        offloaded=(),
    )
    assert settled.params_on_host or part > 0.8
    plain = replace(price(settled), usage_limit=limit)
    choice = same_choice(problem, found, plain, settled.step)
    final = evaluate(plain, choice)
    assert final.objective == found.objective
    solution = replace(found, choice=choice, arcs=final.arcs, objective=final.objective)
    bill = cost_breakdown(settled, make_stage(settled, plain, solution))
    assert bill.estimates.modelled_ns == found.objective


def test_a_plan_is_within_its_memory() -> None:
    free = best_on(request(27.7), silent)
    assert not hosted(free.structure.params.values())
    weights = free.estimates.memory.params
    limit = free.estimates.memory.total - 3 * weights
    with pytest.raises(InfeasibleError):
        best_on(request(27.7, limit, "cuda"), silent)
    found = best_on(request(27.7, limit), silent)
    assert hosted(found.structure.params.values()) > 0
    assert found.estimates.memory.total <= limit
    assert found.estimates.host_bytes > 0


def test_frozen_members_of_a_class_are_not_stepped_on() -> None:
    model = Stack()
    for layer in (model.layers[0], model.layers[2]):
        layer.requires_grad_(False)
    graph = trace(model, (torch.randn(8, WIDTH),), {}).graph
    for mesh, residency, part in (("1", "cpu", 1.0), ("2", "cpu", 1.0), ("2", "auto", 0.8)):
        cluster, laid = on_h100(mesh, 1)
        wanted = Options(PlanOptions(backend="eager"), mesh=mesh, residency=residency)
        free = best_on(make_graph_request(graph, cluster, wanted).on(laid), silent)
        limit = int(part * free.estimates.memory.total)
        found = best_on(make_graph_request(graph, cluster, wanted).on(laid).within(limit), silent)
        assert hosted(found.structure.params.values())


def test_more_memory_brings_parameters_back() -> None:
    free = best_on(request(27.7), silent)
    limit = free.estimates.memory.total - 3 * free.estimates.memory.params
    cluster, _ = on_h100("2", 1)
    wanted = replace(request(27.7, limit).options, microbatches=1)
    explained = make_explainer(make_graph_request(traced().graph, near(cluster, 27.7), wanted))
    assert explained.best.request.params_on_host
    assert explained.more_memory(1 << 30).modelled_ns < 0.9 * explained.best.solution.objective


def hosted(params: object) -> int:
    assert hasattr(params, "__iter__")
    return sum(param.residency == "cpu" for param in params)


def test_all_live_on_the_host_if_that_is_asked_for() -> None:
    found = best_on(request(27.7, residency="cpu", mesh="2x2"), silent)
    assert hosted(found.structure.params.values()) == len(found.structure.params)
    memory = found.estimates.memory
    assert memory.params == memory.gradients == memory.optimizer == 0
    shards = sum(param.num_bytes for param in found.structure.params.values()) // 4
    assert found.estimates.host_bytes >= 4 * shards


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ArgumentError, match="residency='gpu': write one of cuda, cpu, auto"):
        make_options(mesh="2", memory={"residency": "gpu"})
    wanted = request(27.7, residency="cpu")
    muon = replace(wanted, options=replace(wanted.options, given=PlanOptions(optimizer="muon")))
    with pytest.raises(AutoparError, match="muon steps on whole parameters"):
        price(muon)
    unknown = replace(wanted.cluster.host, memory_bytes_per_s=0.0)
    with pytest.raises(AutoparError, match=r"does not say host\.memory_bytes_per_s"):
        price(replace(wanted, cluster=replace(wanted.cluster, host=unknown)))
    limit = best_on(request(27.7), silent).estimates.memory
    lean = request(27.7, limit.total - 3 * limit.params)
    told = "in its host's memory where its share is 1 MiB", "over the memory limit of"
    for each, words in zip((wanted, lean), told, strict=True):
        small = replace(each.cluster.host, memory_bytes=1 << 20)
        with pytest.raises(InfeasibleError, match=words):
            best_on(replace(each, cluster=replace(each.cluster, host=small)), silent)


def planned(limit: int | None, **memory: object) -> Plan:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(256, WIDTH)
    return autopar.plan(model, (x,), cluster="1xH100", memory={"limit": limit, **memory})


def test_parameters_come_to_the_host_unasked_only_if_nothing_fits_otherwise() -> None:
    whole = planned(None)
    limit = int(0.8 * whole.estimates.memory.total)
    asked = planned(limit, residency="auto")
    assert hosted(asked.structure.only.params.values())
    with pytest.raises(InfeasibleError, match=r"would do: .*--memory-residency auto"):
        planned(limit, residency="cuda")
    unasked = planned(limit)
    assert unasked.structure == asked.structure
    assert unasked.provenance.options.memory.residency is None and not unasked.provenance.imposed
    (said,) = [text for text in cautions(unasked) if "host's memory" in text]
    count = hosted(unasked.structure.only.params.values())
    assert said.startswith(f"{count} of {len(unasked.structure.only.params)} parameters live in")
    assert not [text for text in cautions(asked) if "host's memory" in text]
    assert options_of(unasked).residency == options_of(asked).residency == "auto"
    assert options_of(whole).residency == "cuda" and not hosted(
        whole.structure.only.params.values()
    )


def test_where_hosts_are_too_small_as_well_the_error_says_what_would_do() -> None:
    limit = int(0.8 * planned(None).estimates.memory.total)
    said = "would do: .*--memory-host .*Looked for as well: .*parameters on the host, and none fit"
    with pytest.raises(InfeasibleError, match=said) as caught:
        planned(limit, host="1MiB")
    assert "--memory-residency" not in f"{caught.value}"


def test_on_three_axes_parameters_stay_on_devices_unasked() -> None:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(256, WIDTH)
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(model, (x,), cluster="8xH100", mesh="2x2x2", memory={"limit": "4MiB"})
    assert "on the host" not in f"{caught.value}"


def test_what_cannot_be_stepped_on_a_host_is_not_there_unasked() -> None:
    limit = int(0.8 * planned(None).estimates.memory.total)
    with torch.device("meta"):
        model, x = Stack(), torch.empty(256, WIDTH)
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(model, (x,), cluster="1xH100", memory={"limit": limit}, optimizer="muon")
    assert "on the host" not in f"{caught.value}"


def test_stages_that_do_not_fit_have_parameters_on_the_host() -> None:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(256, WIDTH)

    def staged(limit: int | None, **memory: object) -> Plan:
        return autopar.plan(
            model, (x,), cluster="2xH100", microbatches=2, pipeline={"stages": 2},
            memory={"limit": limit, **memory},
        )  # fmt: skip

    limit = int(0.8 * staged(None).estimates.memory.total)
    with pytest.raises(InfeasibleError):
        staged(limit, residency="cuda")
    params = [each for stage in staged(limit).structure.stages for each in stage.params.values()]
    assert hosted(params)


def test_parameters_that_may_go_to_the_host_are_not_counted_as_held() -> None:
    """Where a candidate is looked at before it is priced."""
    with torch.device("meta"):
        model, x = Stack(), torch.empty(256, WIDTH)
    limit = 60 * 2**20
    plan = autopar.plan(
        model, (x,), cluster="1xH100", memory={"residency": "auto", "limit": limit}, microbatches=1
    )
    assert plan.estimates.memory.total <= limit < sum(p.nbytes for p in model.parameters()) * 4
    assert plan.estimates.host_bytes
