"""Pins and forbidden axes take effect on what they name, cost what they cost, and run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.driver.planning import answer
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.sharding import P, R, S, Sharding
from autopar.ir.units import format_bytes
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from tests.looked import looked_at, named
from tests.zoo.cases import ZooCase, make_case, moved
from tests.zoo.chosen import slow
from tests.zoo.equality import assert_equal_to_eager


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two equal blocks and a head; a loss, and what the head makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits.square().mean(), logits


@pytest.fixture(scope="module")
def case() -> ZooCase:
    torch.manual_seed(0)
    return make_case(moved(Model()), {"x": torch.randn(8, 4, 16, dtype=torch.float64)})


def asked(
    *pins: str, forbid: tuple[str, ...] = (), strategy: str = "", mesh: str = "2x2"
) -> Options:
    return make_options(
        mesh=mesh, constraints={"pins": pins, "forbid": forbid, "strategy": strategy}
    )


def planned(case: ZooCase, options: Options) -> Plan:
    return answer(make_graph_request(case.traced.graph, slow((2, 2))[0], options), lambda _: None)


def checked(case: ZooCase, options: Options) -> Plan:
    """The plan, which computes what eager computes, and is not faster than one without limits."""
    plan, free = planned(case, options), planned(case, asked())
    assert_equal_to_eager(case, plan, slow((2, 2))[1])
    assert plan.estimates.step_ns >= free.estimates.step_ns
    return plan


def storages(plan: Plan, name: str) -> set[str]:
    return {p.storage for n, p in plan.structure.params.items() if n.endswith(name)}


def states(plan: Plan, key: str) -> set[Sharding]:
    """Every state that a group's tensor goes through."""
    steps = [s for k, some in plan.structure.only.routes.items() if k.startswith(key) for s in some]
    return {Sharding.parse(text) for step in steps for text in step.split(" -> ")}


def test_parameters_are_stored_as_they_are_pinned(case: ZooCase) -> None:
    plan = checked(case, asked("layers.*.up.weight=[S(0), S(1)]", "*.down.weight=S(0) on dp"))
    assert storages(plan, "up.weight") == {"[S(0), S(1)]"}
    (down,) = storages(plan, "down.weight")
    assert down.startswith("[S(0), ")
    assert plan.provenance.imposed == (
        "pin layers.*.up.weight=[S(0), S(1)]", "pin *.down.weight=S(0) on dp",
    )  # fmt: skip


def test_a_pin_that_is_open_is_the_best_of_those_that_fill_it(case: ZooCase) -> None:
    """Naming an axis leaves the other one to the solver; brackets do not."""
    open_, *filled = (
        planned(case, asked(f"*.down.weight={text}"))
        for text in ("S(0) on dp", "[S(0), R]", "[S(0), S(0)]", "[S(0), S(1)]")
    )
    assert open_.estimates.step_ns == min(plan.estimates.step_ns for plan in filled)
    assert storages(planned(case, asked("*.down.weight=[S(0) on dp]")), "down.weight") == {
        "[S(0), R]"
    }


def test_uneven_shards_can_be_pinned(case: ZooCase) -> None:
    plan = checked(case, asked("head.weight=S(0) on dp, S(0) on tp"))
    assert storages(plan, "head.weight") == {"[C(0), S(0)]"}


def test_what_a_module_returns_is_pinned(case: ZooCase) -> None:
    """Of a norm as it leaves it; of rows of a weight, whose sums are partial, as they end."""
    plan = checked(case, asked("layers.*.norm=S(1) on tp", "layers.*.down=S(2) on tp"))
    assert {
        label.split(",")[1]
        for key, label in plan.structure.only.ops.items()
        if "norm:forward:nat" in key
    } == {"d1"}
    (made,) = (label for key, label in plan.structure.only.ops.items() if "down:forward:mm" in key)
    seen = states(plan, "layers.*.down:forward:mm.0@forward")
    assert made.split(",")[1] == "n" or all(str(s[1]) in ("P", "S(1)") for s in seen)


def test_sums_of_a_module_are_scattered_where_they_are_pinned(case: ZooCase) -> None:
    pins = ("layers.*.down=S(1) on tp", "*.down.weight=S(1) on tp", "param:*.up.weight=S(0) on tp")
    plan = checked(case, asked(*pins, "matmul:layers = in on tp or out on tp", forbid=()))
    (made,) = (label for key, label in plan.structure.only.ops.items() if "down:forward:mm" in key)
    assert made.split(",")[1] == "k"
    steps = plan.structure.only.routes["layers.*.down:forward:mm.0@forward"]
    pairs = [tuple(map(Sharding.parse, step.split(" -> "))) for step in steps]
    assert {b[1] for a, b in pairs if a[1] == P and b[1] != P} == {S(0, 1)}


def test_inputs_are_used_as_they_are_pinned(case: ZooCase) -> None:
    plan = checked(case, asked("input:0=S(0) on tp, S(1) on dp"))
    seen = states(plan, "input:0")
    assert Sharding.parse("[S(1), S(0)]") in seen
    ends = {state for state in seen if not state.is_replicated}
    assert all({str(p) for p in state} <= {"R", "S(0)", "S(1)"} for state in ends)


def test_outputs_are_returned_as_they_are_pinned(case: ZooCase) -> None:
    plan = checked(case, asked("output:1=[S(1), S(0)]"))
    assert plan.structure.only.outputs == {"detached:1": "[S(1), S(0)]"}
    with pytest.raises(InfeasibleError, match=r"output:0=S\(0\) on dp.*loss 0 on mesh"):
        planned(case, asked("output:0=R", "output:0=S(0) on dp"))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("pattern", ["head", "layers"])
def test_nothing_is_sharded_on_an_axis_that_is_forbidden(case: ZooCase, pattern: str) -> None:
    plan = checked(case, asked(forbid=(f"tp:{pattern}",)))
    ops = [label for key, label in plan.structure.only.ops.items() if key.startswith(pattern)]
    assert ops and all(label.split(",")[1][0] in "-+" for label in ops)
    params = [p for n, p in plan.structure.params.items() if n.startswith(pattern)]
    assert all(Sharding.parse(text)[1] == R for p in params for text in (p.storage, p.for_backward))
    free = planned(case, asked()).structure.only.ops
    assert any(label.split(",")[1][0] not in "-+" for k, label in free.items() if pattern in k)


def test_storage_alone_is_forbidden_an_axis(case: ZooCase) -> None:
    plan = checked(case, asked(forbid=("dp:param:*", "*:param:head.*")))
    assert all(Sharding.parse(p.storage)[0] == R for p in plan.structure.params.values())
    assert storages(plan, "head.weight") == {"[R, R]"}


def test_an_axis_is_forbidden_to_all(case: ZooCase) -> None:
    one = planned(case, asked(forbid=("tp:*",)))
    assert all(label.split(",")[1][0] in "-+" for label in one.structure.only.ops.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (asked("layers.0.up.weight=R"), "layers.0.up.weight and layers.1.up.weight are planned as"),
        (asked("layers.*=R"), "names parameters and modules; write param:layers"),
        (asked("layers.*.up.wieght=R"), "close to it are layers.*.up.weight"),
        (asked("head.weight=S(0) on pp"), r"mesh dp=2,tp=2 has no axis pp"),
        (asked("head.weight=[S(0)]"), "is for 1 mesh axes, and mesh dp=2,tp=2 has 2"),
        (asked(strategy="3d"), "3d needs a mesh of three axes of the same size"),
    ],
)
def test_what_is_not_there_is_told(case: ZooCase, options: Options, words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        planned(case, options)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "options",
    [
        asked("head.weight=R", "head.weight=S(0) on dp", "*.up.weight=R"),
        asked("*.up.weight=S(0) on tp", forbid=("tp:layers", "dp:head")),
        asked("*.up.weight=S(0) on tp", "head.bias=R", strategy="ddp"),
        asked("head.weight=S(5) on tp", strategy="fsdp"),
        asked("layers.*.norm=S(1) on dp", forbid=("tp:head",), strategy="ddp"),
        asked("input:0=S(2) on tp", "head.bias=R", strategy="ddp"),
    ],
)
def test_limits_that_conflict_do_not_without_any_one_of_them(
    case: ZooCase, options: Options
) -> None:
    named = conflict(case, options)
    assert named
    for origin in named:
        planned(case, with_only(options, set(named) - {origin}))


def with_only(options: Options, kept: set[str]) -> Options:
    strategy = options.strategy if f"strategy {options.strategy}" in kept else ""
    constraints = tuple(each for each in options.constraints if each.origin in kept)
    return replace(options, constraints=constraints, strategy=strategy)


def conflict(case: ZooCase, options: Options) -> list[str]:
    """What is named of what is asked, after it was seen to be infeasible."""
    with pytest.raises(InfeasibleError) as caught:
        planned(case, options)
    listed = str(caught.value).partition(". Together")[0].partition(" leaves no plan")[0]
    return [origin for origin in options.imposed if origin in listed]


@pytest.mark.nightly
def test_memory_is_one_of_the_limits_that_conflict(case: ZooCase) -> None:
    """Whole parameters do not fit where shards do."""
    cut = planned(case, asked(strategy="fsdp")).estimates.memory.total
    whole = planned(case, asked("param:*=R")).estimates.memory.total
    limited = replace(asked("*.bias=R", strategy="ddp"), memory_limit_bytes=(cut + whole) // 2)
    with pytest.raises(InfeasibleError) as caught:
        planned(case, limited)
    listed, _, why = str(caught.value).partition(". Together: ")
    assert listed.endswith(": strategy ddp; memory limit " + format_bytes((cut + whole) // 2))
    assert "Most is held by param:layers" in why or "peaks at" in why
    assert planned(case, with_only(limited, {"pin *.bias=R"})).world_size == 4
    with pytest.raises(
        InfeasibleError, match=r"^mesh dp=2,tp=2: the smallest-memory plan"
    ) as alone:
        planned(case, replace(limited, memory_limit_bytes=64))
    assert "limits conflict" not in str(alone.value)


def test_a_search_passes_over_meshes_that_lack_an_axis_that_is_named(case: ZooCase) -> None:
    def tried(*pins: str) -> set[str]:
        return looked_at(planned(case, asked(*pins, mesh="auto")))

    assert tried("head.weight=S(0) on tp") == named("dp=2,tp=2")
    assert tried("head.weight=[S(0), R]") == named("dp=2,tp=2")
    assert tried("head.weight=R on tp") == tried("head.weight=R") == named("dp=4", "dp=2,tp=2")
    with pytest.raises(ConstraintError, match=r"no axis pp.*of the meshes tried, dp=4, dp=2,tp=2"):
        tried("head.weight=S(0) on pp")
