"""Strategies are points of the space, told from the graph: each sends what it is known for,
whatever the model, and computes what eager computes."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.errors import AutoparError
from autopar.ir.sharding import Sharding
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.runtime.program.program import Program
from autopar.tracer import trace
from tests.codegen.test_schemes import SCHEMES, B, Product, S
from tests.layouts import program_of
from tests.looked import looked_at, named
from tests.planned import collectives, on_h100
from tests.sent import observed, received
from tests.zoo.cases import ZooCase, make_case, moved, trained
from tests.zoo.chosen import slow
from tests.zoo.equality import assert_equal_to_eager

STRATEGIES = {
    "ddp": "2x2",
    "fsdp": "2x2",
    "megatron": "2x2",
    "2d": "2x2",
    "2.5d": "2x2x2",
    "3d": "2x2x2",
}


class Mlp(torch.nn.Module):
    """Layers of one kind, whose weights are square."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


@cache
def mlp() -> ZooCase:
    torch.manual_seed(0)
    return make_case(moved(Mlp()), {"x": torch.randn(8, 4, 16, dtype=torch.float64)})


def case(name: str) -> ZooCase:
    return mlp() if name == "mlp" else trained(name)


@cache
def planned(name: str, strategy: str, mesh: str = "") -> Plan:
    """The best plan on devices on which it pays to divide all work."""
    mesh = mesh or STRATEGIES[strategy]
    cluster, _ = slow([int(size) for size in mesh.split("x")])
    options = make_options(mesh=mesh, constraints={"strategy": strategy})
    return answer(make_graph_request(case(name).traced.graph, cluster, options), lambda _: None)


def program(name: str, strategy: str) -> Program:
    traced = case(name).traced
    return program_of(traced, planned(name, strategy).structure.only)


def kinds(found: Counter[tuple[str, str]]) -> set[str]:
    return {kind for kind, _ in found}


@pytest.mark.breadth(7)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, each) for name in ("gpt2", "vit", "mlp") for each in STRATEGIES),
        *(
            (name, each)
            for name in ("llama", "mobile")
            for each in ("ddp", "fsdp", "megatron", "2d")
        ),
        ("llama", "3d"),
    ],
)
def test_a_strategy_computes_what_eager_computes(name: str, strategy: str) -> None:
    plan = planned(name, strategy)
    assert_equal_to_eager(case(name), plan, slow([a.size for a in plan.structure.only.mesh])[1])


@pytest.mark.breadth(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_is_no_faster_than_the_best_of_all_plans(strategy: str) -> None:
    free = planned("mlp", "", STRATEGIES[strategy])
    assert free.estimates.added_up_ns <= planned("mlp", strategy).estimates.added_up_ns


@pytest.mark.parametrize(
    ("strategy", "scheme"),
    [
        ("ddp", "data parallel"),
        ("fsdp", "ZeRO-3"),
        ("2d", "2D"),
        ("2.5d", "2.5D"),
        ("3d", "3D"),
    ],
)
def test_a_strategy_sends_and_saves_what_the_formulas_of_its_scheme_say(
    strategy: str, scheme: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, S, dtype=torch.float64)
    model, wanted = Product().double(), SCHEMES[scheme]
    traced = trace(model, (x,), {})
    cluster, mesh = on_h100(wanted.mesh)
    options = make_options(mesh=wanted.mesh, constraints={"strategy": strategy})
    plan = answer(make_graph_request(traced.graph, cluster, options), lambda _: None)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()} | {"input:0": x}
    made = program_of(traced, plan.structure.only)
    step = observed(made, mesh, traced.graph, plan.structure, tensors)
    assert received(step.forward, mesh) == wanted.forward
    assert received(step.backward, mesh) == wanted.backward
    assert sum(v.nbytes for v in step.saved if v.numel() > 1 and v is not x) == wanted.saved


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_ddp_reduces_gradients_and_nothing_else(name: str) -> None:
    made, plan = program(name, "ddp"), planned(name, "ddp")
    num_params = len(plan.structure.params)
    assert kinds(collectives(made.forward)) == {"all_reduce"}, "of the loss"
    found = collectives(made.backward)
    # The gradient of a tied weight is the sum of two, each of which is reduced.
    tied = name == "gpt2"
    assert found == {("all_reduce", axis): num_params + tied for axis in ("dp", "tp")}
    assert all(p.storage == "[R, R]" for p in plan.structure.params.values())


def test_ddp_sends_no_token_to_an_expert() -> None:
    plan = planned("mixtral", "ddp")
    assert_equal_to_eager(case("mixtral"), plan, slow((2, 2))[1])
    experts = {label for key, label in plan.structure.only.ops.items() if ":experts" in key}
    assert experts == {"n.0,n.0"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_fsdp_gathers_parameters_and_scatters_gradients(name: str) -> None:
    made, plan = program(name, "fsdp"), planned(name, "fsdp")
    num_params = len(plan.structure.params)
    assert all(
        p.storage == p.for_backward and all(each.kind in "SC" for each in Sharding.parse(p.storage))
        for p in plan.structure.params.values()
    )
    forward, backward = collectives(made.forward), collectives(made.backward)
    assert kinds(forward) == {"all_gather", "all_reduce"}
    assert forward["all_gather", "dp"] == forward["all_gather", "tp"] == num_params
    assert kinds(backward) <= {"all_gather", "reduce_scatter", "all_reduce"}
    # Positions have no samples: what reaches their table may be summed before, whole.
    summed = name == "gpt2"
    assert all(backward["reduce_scatter", axis] >= num_params - summed for axis in ("dp", "tp"))


def test_megatron_cuts_every_layer_in_columns_then_rows() -> None:
    """On the inner axis two sums per layer forward and two backward, and no parameter moves."""
    plan = planned("llama", "megatron")
    params = plan.structure.params
    inner = {
        name.split(".", 3)[-1]: str(Sharding.parse(param.storage)[1])
        for name, param in params.items()
        if name.startswith("model.layers.")
    }
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert all(inner[name] == "S(0)" for name in inner if name.split(".")[-2] in columns)
    assert all(
        inner[name] == "S(1)" for name in inner if name.split(".")[-2] in ("o_proj", "down_proj")
    )
    assert str(Sharding.parse(params["lm_head.weight"].storage)[1]) == "S(0)", "vocabulary"
    for key, steps in plan.structure.only.routes.items():
        if key.startswith("param:"):
            assert all(_axes_moved(text) == [0] for text in steps), "only on the outer axis"
    sums = [
        key for key, steps in plan.structure.only.routes.items() if any("P] ->" in s for s in steps)
    ]
    layers = [key for key in sums if (".layers." in key and ":mm." in key) or ":add." in key]
    assert [key.partition("@")[2] for key in layers].count("forward") == 2
    assert [key.partition("@")[2] for key in layers].count("backward") == 2


def _axes_moved(step: str) -> list[int]:
    source, target = map(Sharding.parse, step.split(" -> "))
    return [k for k, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]


def best(strategy: str, cluster: str) -> Plan:
    options = make_options(constraints={"strategy": strategy})
    asked = make_graph_request(mlp().traced.graph, parse_cluster(cluster), options)
    return answer(asked, lambda _: None)


@pytest.mark.nightly
def test_meshes_of_many_devices_that_suit_are_searched() -> None:
    assert looked_at(best("2.5d", "8xH100")) == named("dp=2,cp=2,tp=2")
    # Which axis is the inner one matters, though both have the same link.
    assert looked_at(best("megatron", "8xH100")) == named("dp=8", "dp=2,tp=4", "dp=4,tp=2")


def test_a_mesh_is_searched_among_those_that_suit() -> None:
    assert looked_at(best("2d", "4xH100")) == named("dp=2,tp=2")
    assert best("3d", "1xH100").world_size == 1
    with pytest.raises(AutoparError, match=r"3d needs a mesh of three axes.*none is suited"):
        best("3d", "4xH100")
    with pytest.raises(AutoparError, match="8 samples do not divide by 16"):
        best("ddp", "2x8xH100")
