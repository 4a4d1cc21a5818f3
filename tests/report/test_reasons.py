"""What a stored plan says of its parts, against its own bill; Python and notebooks."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.driver.search.meshes import summary
from autopar.errors import AutoparError
from autopar.ir.sharding import Sharding
from autopar.plans.plan import Plan
from autopar.plans.provenance import Margin
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.structure import Param
from autopar.report import placed
from autopar.report.costs import costs
from autopar.report.limits import Bottlenecks, find_limits, margin_text
from autopar.report.names import clean
from autopar.report.printed import plain
from autopar.report.reasons import reasons
from autopar.report.timeline import timeline
from tests.graphs import linear_step
from tests.redone import repriced
from tests.report.any_plans import plans
from tests.report.plans import MS, half_hidden_plan, renamed, two_axis_plan

HOSTILE = "\x1b[31m<script>alert('x')</script>&amp;"


def limits_of(plan: Plan) -> Bottlenecks:
    return find_limits(plan.stages[0], timeline(plan.stages[0]))


@cache
def plan_of(cluster: str = "2x4xH100", mesh: str = "2x4") -> Plan:
    return answer(
        make_graph_request(
            linear_step(256, 1024, 2048, layers=3), parse_cluster(cluster), Options(mesh=mesh)
        ),
        lambda _: None,
    )


def test_an_op_costs_what_the_bill_says() -> None:
    plan = plan_of()
    for key, op in plan.estimates.stages[0].ops.items():
        if not key.startswith("param:"):
            found = reasons(plan.stages[0], key)
            assert (found.kind, found.time_ns) == ("op", op.compute_ns + op.communication_ns)


def test_a_parameter_costs_its_gathers_its_gradient_and_its_update() -> None:
    plan = plan_of()
    for number in range(3):
        stored = plan.estimates.stages[0].ops[f"param:w{number}"]
        gradient = plan.estimates.stages[0].ops[f"wgrad.{number}"]
        assert stored.inputs[0][0] == f"wgrad.{number}"
        found = reasons(plan.stages[0], f"w{number}")
        own = stored.communication_ns + stored.optimizer_ns
        assert found.time_ns == own + gradient.communication_ns > 0


def test_what_is_said_of_a_parameter() -> None:
    plan = plan_of()
    param = plan.structure.params["w1"]
    (decision,) = reasons(plan.stages[0], "w1").decisions
    assert decision.choice[0].startswith(f"stored {on_axes(param, plan)}: ")
    assert [line.split(":")[0] for line in decision.choice[2:]] == ["dp", "tp"]
    read = {
        key for key, op in plan.estimates.stages[0].ops.items() if "param:w1" in dict(op.inputs)
    }
    assert read == {"forward.1", "dgrad.1"}
    assert sorted(line.partition(" as ")[0] for line in decision.reads) == [
        "read by mm in backward", "read by mm in forward"
    ]  # fmt: skip


def on_axes(param: Param, plan: Plan) -> str:
    return placed.on_axes(Sharding.parse(param.storage), plan.structure.only.mesh)


def test_what_a_device_holds_adds_up() -> None:
    plan = plan_of()
    each = [reasons(plan.stages[0], name) for name in plan.structure.params]
    held = {
        what: sum(h.num_bytes for found in each for h in found.holdings if h.what == what)
        for what in ("parameters", "gradients", "optimizer states")
    }
    memory = plan.estimates.memory
    assert held == {
        "parameters": memory.params,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer,
    }


@pytest.mark.parametrize(
    ("name", "kind", "num_decisions"),
    [
        ("", "plan", 0),
        ("model.layers.2.mlp.up.weight", "parameter", 1),
        ("param:model.layers.*.mlp.up.weight", "parameter", 1),
        ("model.layers.*.mlp.down.weight", "parameter", 2),
        ("model.layers.0.mlp.down.weight", "parameter", 1),
        ("*.weight", "parameter", 4),
        ("model.layers.*.mlp.down", "module", 4),
        ("model.layers.3.mlp", "module", 6),
        ("lm_head", "module", 3),
        ("model", "module", 7),
        ("(model)", "module", 1),
    ],
)
def test_names(name: str, kind: str, num_decisions: int) -> None:
    found = reasons(two_axis_plan().stages[0], name)
    assert (found.kind, len(found.decisions)) == (kind, num_decisions)
    assert found.share == pytest.approx(found.time_ns / (34 * MS)), "of all that is added up"


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("model.layers.*.mlp.up.wieght", "model.layers.*.mlp.up.weight"),
        ("layers.*.mlp.down", "model.layers.*.mlp.down"),
        ("up.weight", "model.layers.*.mlp.up.weight"),
        ("lm_heads", "lm_head"),
    ],
)
def test_names_that_are_not_there(name: str, close: str) -> None:
    with pytest.raises(AutoparError, match="Toy has no parameter, module or op") as raised:
        reasons(two_axis_plan().stages[0], name)
    assert close in str(raised.value)


@settings(max_examples=30)
@given(plan=plans(), width=st.integers(40, 200))
def test_every_plan_is_explained_within_the_width(plan: Plan, width: int) -> None:
    names = ["", *plan.structure.params, *(k for k in plan.estimates.stages[0].ops if ":" in k)]
    for name in names:
        for line in plain(reasons(plan.stages[0], name).page(), width).split("\n"):
            assert line.isprintable()
            assert cell_len(line) <= width


@pytest.mark.parametrize("name", [HOSTILE, "a\nb", "\u202egnp", "[red]x[/]"])
def test_names_cannot_command_the_terminal(name: str) -> None:
    plan = renamed(two_axis_plan(), name)
    text = plain(reasons(plan.stages[0], name).page(), 400)
    assert all(c.isprintable() for line in text.split("\n") for c in line)
    assert clean(name).split(" ")[0] in text


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    [("2x4xH100", "8"), ("2x4xH100", "2x4"), ("2x4xH100", "4x2"), ("2x4xH100", "2x2x2"),
     ("8xL4", "2x4"), ("8x1xA100", "4x2")],
)  # fmt: skip
def test_links_of_axes_are_those_of_the_mesh(cluster: str, mesh: str) -> None:
    graph, described = linear_step(64, 64, 64), parse_cluster(cluster)
    plan = answer(make_graph_request(graph, described, Options(mesh=mesh)), lambda _: None)
    links = {axis.axis: axis.link for axis in limits_of(plan).axes}
    assert links == {axis.name: axis.link.name for axis in parse_mesh(mesh, described).axes}


def with_memory(plan: Plan, limit: int) -> Plan:
    estimates = repriced(plan.estimates, memory_limit=limit)
    return msgspec.structs.replace(plan, estimates=estimates)


def test_memory_is_short_near_the_limit() -> None:
    plan = two_axis_plan()
    peak = plan.estimates.memory.total
    assert limits_of(with_memory(plan, peak)).binds[0].startswith("memory is short")
    assert limits_of(with_memory(plan, 2 * peak)).binds[0].startswith("memory is not short")


def test_shares_of_the_step_are_of_what_the_device_waits_for() -> None:
    plan = two_axis_plan()
    limits, estimates = limits_of(plan), plan.estimates
    shares = limits.compute_share, limits.communication_share, limits.optimizer_share
    assert shares == pytest.approx((21 / 31, 6 / 31, 4 / 31))
    assert sum(shares) == pytest.approx(1)
    first = limits.axes[0]
    assert (first.axis, first.share) == ("tp", pytest.approx(8 / 31))
    assert limits.binds[1] == (
        "compute dominates the step: compute 67.7 %, exposed communication 19.4 %, the optimizer "
        "12.9 %; the busiest axis is tp, for 25.8 % of the step, of which 66.7 % is exposed"
    )
    assert sum(cost.share for cost in costs(estimates.stages[0])) <= 1
    whole = reasons(plan.stages[0])
    assert whole.time_ns == estimates.added_up_ns == plan.provenance.objective_ns
    assert "What a step goes to: 34 ms with nothing hidden" in str(whole)
    assert "What it costs: 6 ms, 17.6 % of a step with nothing hidden" in str(
        reasons(plan.stages[0], "lm_head")
    )


@pytest.mark.parametrize("by_ns", [-5000, 0, 5000])
def test_axes_add_up_to_the_plan_where_the_drawn_step_rounds(by_ns: int) -> None:
    plan = half_hidden_plan()
    estimates = repriced(
        plan.estimates,
        exposed_communication_ns=plan.estimates.exposed_communication_ns + by_ns,
        hidden_communication_ns=plan.estimates.hidden_communication_ns - by_ns,
    )
    axes = limits_of(msgspec.structs.replace(plan, estimates=estimates)).axes
    assert sum(axis.exposed_ns for axis in axes) == estimates.exposed_communication_ns
    assert sum(axis.hidden_ns for axis in axes) == estimates.hidden_communication_ns
    assert all(axis.exposed_ns + axis.hidden_ns == axis.time_ns for axis in axes)


def test_the_line_on_what_was_found_has_both_sums() -> None:
    assert summary(two_axis_plan()) == (
        "step 31 ms, of which exposed communication 6 ms; as modelled 34 ms, feasible"
    )


def with_margin(margin: Margin | None) -> Plan:
    plan = two_axis_plan()
    provenance = msgspec.structs.replace(plan.provenance, margin=margin)
    return msgspec.structs.replace(plan, provenance=provenance)


@pytest.mark.parametrize(
    ("margin", "words", "warning"),
    [
        (None, "not in the plan", ""),
        (Margin(35_700_000, 35_700_000, "w whole"), "takes 35.7 ms (5 % longer): w whole", ""),
        (Margin(34_100_000, 34_100_000, "w whole"), "34.1 ms", "fragile: as modelled, a"),
        (
            Margin(34_000_000, None, ""),
            "none is proven to take longer",
            "may be fragile: as modelled",
        ),
        (Margin(34_340_000, 35_700_000, "w"), "none takes less than 34.3 ms (1 % longer)", ""),
    ],
)
def test_margin_in_words(margin: Margin | None, words: str, warning: str) -> None:
    plan = with_margin(margin)
    told = margin_text(plan.provenance)
    assert words in told and plan.explain().margin == told
    assert margin is None or told.startswith("as modelled, ")
    found = [text for text in plan.summary().warnings if "fragile" in text]
    assert len(found) == bool(warning)
    assert all(text.startswith(warning) for text in found)


def test_a_plan_shows_itself() -> None:
    plan = two_axis_plan()
    assert str(plan.summary()) == plain(plan.summary().page())
    assert str(plan.explain("lm_head")) == plain(reasons(plan.stages[0], "lm_head").page())
    assert plan.explain() == reasons(plan.stages[0])
    bundle = plan._repr_mimebundle_()
    assert bundle == {"text/plain": str(plan.summary()), "text/html": plan._repr_html_()}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert {name for name, _ in attrs} <= {"style", "open"}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_holds_what_a_plan_says_and_nothing_that_runs() -> None:
    for plan in (two_axis_plan(), renamed(two_axis_plan(), HOSTILE)):
        tags = _Tags()
        tags.feed(plan._repr_html_())
        assert not tags.open
        assert not tags.seen & {"script", "img", "a", "iframe", "link"}
        text = "".join(tags.texts)
        assert clean(plan.structure.model) in text
        assert all(map(str.isprintable, text.splitlines()))
    assert "model.layers.{1-3}.mlp.down.weight" in two_axis_plan()._repr_html_()
