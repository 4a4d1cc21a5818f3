"""What `diff` finds between plans made by hand, and what of it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.plans.cluster_rates import ClusterRates, LinkRates
from autopar.plans.plan import Plan
from autopar.plans.structure import MeshAxis, Param
from autopar.report.cautions import cautions
from autopar.report.difference import Difference, compare
from autopar.report.printed import plain
from autopar.report.verdict import DIFFERENT, SAME, judge, markdown, parse_bounds
from tests.redone import redecided, repriced
from tests.report.any_plans import plans
from tests.report.plans import MS, two_axis_plan

replace = msgspec.structs.replace
OLD = two_axis_plan()


def with_structure(**fields: Any) -> Plan:
    return replace(OLD, structure=redecided(OLD.structure, **fields))


def with_estimates(**fields: Any) -> Plan:
    return replace(OLD, estimates=repriced(OLD.estimates, **fields))


def with_params(change: Callable[[str, Param], Param | None]) -> Plan:
    changed = {name: change(name, param) for name, param in OLD.structure.params.items()}
    return with_structure(params={name: p for name, p in changed.items() if p is not None})


def found(new: Plan, old: Plan = OLD) -> list[tuple[str, str, str, int, str, str]]:
    return [
        (topic.cause, topic.title, change.what, change.count, change.before, change.after)
        for topic in compare(old, new).topics
        for change in topic.changes
    ]


def text(difference: Difference, fail_over: str | None = None, width: int = 100) -> str:
    bounds = None if fail_over is None else parse_bounds(fail_over)
    return plain(judge(difference, bounds).page(), width)


def rates(bytes_per_s: int) -> ClusterRates:
    link = LinkRates("IB", 2, bytes_per_s, 4000, 14000, 10**6, ())
    return ClusterRates("A100", "datasheet", 80 << 30, 10**12, {"float32": 10**13}, {}, (link,))


ALL_UP = "model.layers.{0-3}.mlp.up.weight"
UP = OLD.structure.params["model.layers.0.mlp.up.weight"]


CASES: dict[str, tuple[Plan, tuple[str, str, str, int, str, str]]] = {
    "parameter elsewhere": (
        with_params(lambda n, p: replace(p, for_backward="[S(0), S(1)]") if "up" in n else p),
        (
            "decision", "parameters", ALL_UP, 4,
            "[S(1) on tp, S(0) on dp], for backward [S(1) on tp]", "[S(1) on tp, S(0) on dp]",
        ),
    ),
    "wider parameter": (
        with_params(lambda n, p: replace(p, shape=(256, 2048)) if "up" in n else p),
        (
            "model", "parameters of another shape or type", ALL_UP, 4,
            "bfloat16[256, 1024]", "bfloat16[256, 2048]",
        ),
    ),
    "parameter gone": (
        with_params(lambda n, p: None if "lm_head" in n else p),
        (
            "model", "parameters that are new or gone", "lm_head.weight", 1,
            "bfloat16[256, 4097]", "",
        ),
    ),
    "op elsewhere": (
        with_structure(ops={"model.layers.*.mlp.up/mm": "b,-"}),
        ("decision", "ops", "model.layers.*.mlp.up/mm", 1, "n on tp, b on dp", "b on dp"),
    ),
    "op gone": (
        with_structure(ops={}),
        (
            "model", "ops that are new or gone", "model.layers.*.mlp.up/mm", 1,
            "4 of each", "",
        ),
    ),
    "saved elsewhere": (
        with_structure(saved={"lm_head:forward:mm.0": "[R, S(1)]"}),
        (
            "decision", "activations saved for backward", "lm_head forward: mm.0", 1,
            "as computed", "[S(1) on tp]",
        ),
    ),
    "route": (
        with_structure(routes={}),
        (
            "decision", "redistribution of tensors",
            "model.layers.*.mlp.down/mm: (for forward)", 1,
            "[P on tp, S(0) on dp] to [S(0) on dp]", "stays",
        ),
    ),
    "output": (
        with_structure(outputs={"detached:1": "[S(0), R]"}),
        ("decision", "outputs", "detached: 1", 1, "", "[S(0) on dp]"),
    ),
    "mesh": (
        with_structure(axes=(MeshAxis("dp", 4), MeshAxis("tp", 2))),
        ("decision", "mesh", "mesh", 1, "dp=2,tp=4", "dp=4,tp=2"),
    ),
    "inputs": (
        with_structure(inputs=("input_ids: int64[16, 128]",)),
        (
            "request", "inputs", "input input_ids", 1,
            "input_ids: int64[8, 128]", "input_ids: int64[16, 128]",
        ),
    ),
    "optimizer": (
        with_structure(optimizer="sgd"),
        ("request", "optimizer", "optimizer", 1, "adamw", "sgd"),
    ),
    "cluster": (
        with_structure(cluster="8xA100"),
        ("request", "cluster", "cluster", 1, "2x4xA100", "8xA100"),
    ),
    "memory limit": (
        with_estimates(memory_limit=45 << 20),
        ("request", "cluster", "memory limit", 1, "50 MiB", "45 MiB"),
    ),
    "fingerprint": (
        with_structure(fingerprint="e" * 32),
        ("model", "fingerprint", "fingerprint of the graph", 1, "f" * 32, "e" * 32),
    ),
    "op without a rule": (
        with_structure(replicated_unknown_ops=()),
        (
            "model", "ops without a sharding rule", "mylib.twist.default", 1,
            "no rule: whole on every device", "",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("new", "change"), CASES.values(), ids=CASES.keys())
def test_each_change_is_named_under_its_cause(
    new: Plan, change: tuple[str, str, str, int, str, str]
) -> None:
    assert found(new) == [change]
    verdict = judge(compare(OLD, new))
    assert verdict.status == DIFFERENT
    assert change[1] in verdict.reasons[0]
    shown = " ".join(text(compare(OLD, new), width=300).split())
    assert " ".join(change[2].split()) in shown
    assert " ".join(change[5].split()) in shown


def test_what_weighs_most_comes_first() -> None:
    keys = {
        "lm_head/mm": "n,-",
        "model.layers.*.mlp.up/mm": "n,-",
        "model.layers.*.norm/mul": "n,-",
    }
    old = with_structure(ops=dict.fromkeys(keys, "b,n"))
    # 4, 3 and 1 ms.
    order = ["model.layers.*.mlp.up/mm", "lm_head/mm", "model.layers.*.norm/mul"]
    assert [what for _, _, what, *_ in found(with_structure(ops=keys), old)] == order


def test_a_plan_is_the_same_as_itself() -> None:
    verdict = judge(compare(OLD, OLD))
    assert (verdict.status, verdict.reasons) == (SAME, ())
    assert found(OLD) == []
    assert text(verdict.difference).splitlines()[0].split() == ["plans", "same"]
    assert "bill" not in text(verdict.difference)


def test_a_layer_more_is_counted_by_block() -> None:
    ops = {
        key: replace(total, count=5) if "*" in total.module and total.count else total
        for key, total in OLD.estimates.stages[0].ops.items()
    }
    structure = redecided(OLD.structure, ops=dict.fromkeys(ops, "b,n"))
    old = replace(OLD, structure=structure)
    new = replace(old, estimates=repriced(old.estimates, ops=ops))
    title = "ops done more or less often"
    assert found(new, old) == [("model", title, "model.layers.*", 4, "4 of each", "5 of each")]


def test_rates_of_the_cluster_count_from_one_percent_on() -> None:
    old, near, far = (with_estimates(cluster=rates(n)) for n in (10**10, 10**10 - 10**8, 9 * 10**9))
    assert found(near, old) == []
    what = "bandwidth of the link of level 0"
    assert found(far, old) == [("request", "cluster", what, 1, "9.31 GiB/s", "8.38 GiB/s")]


def test_ops_whose_tensors_have_another_shape() -> None:
    key = "model.layers.*.mlp.up/mm"

    def making(kind: str) -> Plan:
        total = replace(OLD.estimates.stages[0].ops[key], outputs=((kind, "[S(0), S(1)]"),))
        return with_estimates(ops=OLD.estimates.stages[0].ops | {key: total})

    old, new = making("bfloat16[64, 128]"), making("bfloat16[64, 256]")
    title = "ops that make tensors of another shape or type"
    assert found(new, old) == [("model", title, key, 1, "bfloat16[64, 128]", "bfloat16[64, 256]")]


def test_what_does_not_count_is_told_as_well() -> None:
    new = with_structure(ops={"model.layers.*.mlp.up/mm": "b,-"})
    verdict = judge(compare(OLD, new), parse_bounds("time=1%"))
    assert verdict.status == SAME
    assert "different, but in nothing that counts" in text(verdict.difference, "time=1%")
    assert markdown(verdict, "x").splitlines()[2].startswith("Nothing that counts changed: ")
    assert markdown(judge(compare(OLD, OLD)), "x").splitlines()[2].startswith("Same plan: ")


def test_what_went_with_an_op_is_no_decision() -> None:
    """A route or a saved activation of an op that only one plan has."""
    key = "extra:forward:mm.0"
    new = with_structure(
        ops=OLD.structure.only.ops | {key: "b,n"},
        saved={f"{key}.1": "[R, R]"},
        routes=OLD.structure.only.routes | {f"{key}@backward": ("[R, P] -> [R, R]",)},
    )
    assert {(cause, title) for cause, title, *_ in found(new)} == {
        ("model", "ops that are new or gone")
    }


@settings(max_examples=60)
@given(old=plans(), new=plans(), same=st.booleans())
def test_topics_are_there_exactly_where_structures_differ(old: Plan, new: Plan, same: bool) -> None:
    estimates = repriced(new.estimates, memory_limit=old.estimates.memory_limit)
    new = replace(new, structure=old.structure if same else new.structure, estimates=estimates)
    totals = (
        old.structure.only.ops.keys()
        & old.estimates.stages[0].ops.keys()
        & new.estimates.stages[0].ops.keys()
    )
    counted = any(
        old.estimates.stages[0].ops[k].count != new.estimates.stages[0].ops[k].count for k in totals
    )
    topics = compare(old, new).topics
    assert bool(topics) == (old.structure != new.structure or counted)


def test_estimates_count_from_one_percent_of_the_step_or_the_peak_on() -> None:
    step = OLD.estimates.step_ns
    assert judge(compare(OLD, with_estimates(step_ns=step + step // 100))).status == SAME
    assert judge(compare(OLD, with_estimates(step_ns=step + step // 100 + 1))).status == DIFFERENT
    assert judge(compare(OLD, with_estimates(step_ns=step - step // 50))).status == DIFFERENT
    # A fifth of the optimizer's 4 ms is more than 1 % of the step's 31 ms; a twentieth is not.
    assert judge(compare(OLD, with_estimates(optimizer_ns=5 * MS))).status == DIFFERENT
    assert judge(compare(OLD, with_estimates(optimizer_ns=4 * MS + MS // 5))).status == SAME
    gone = replace(OLD.estimates.memory, saved=0)
    verdict = judge(compare(OLD, with_estimates(memory=gone)))
    assert verdict.reasons == ("estimates moved (peak, activations saved for backward)",)


def test_the_bill_has_both_sides() -> None:
    new = with_estimates(step_ns=32 * MS, communication_ns=10 * MS, collectives=())
    figures = {f.name: f for f in compare(OLD, new).costs}
    assert (figures["step"].before, figures["step"].after) == (31 * MS, 32 * MS)
    assert figures["step"].change_percent == pytest.approx(100 / 31, abs=1e-4)
    assert (figures["all_reduce on tp"].before, figures["all_reduce on tp"].after) == (8 * MS, 0)
    shown = text(compare(OLD, new))
    assert [line.split() for line in shown.splitlines() if "step  " in line] == [
        ["step", "31", "ms", "32", "ms", "+3.23", "%"]
    ]


@pytest.mark.parametrize(
    ("bounds", "status"),
    [
        ("time=2%", DIFFERENT),
        ("time=4%", SAME),
        ("time=3.2258%", DIFFERENT),
        ("time=3.2259%", SAME),
        ("memory=0%", SAME),
        ("memory=1%,communication=5%", DIFFERENT),
        ("structure", DIFFERENT),
        ("model", SAME),
        ("time=4%, structure", DIFFERENT),
    ],
)
def test_fail_over(bounds: str, status: int) -> None:
    new = replace(
        with_structure(ops={"model.layers.*.mlp.up/mm": "b,-"}),
        estimates=repriced(OLD.estimates, step_ns=32 * MS, communication_ns=10 * MS),
    )
    assert judge(compare(OLD, new), parse_bounds(bounds)).status == status
    if "structure" not in bounds:
        assert judge(compare(new, OLD), parse_bounds(bounds)).status == SAME, "less is no growth"


@pytest.mark.parametrize(
    "bounds", ["", "time", "time=2", "time=-1%", "tiem=2%", "time=1%,time=2%", "structure=1%", ","]
)
def test_fail_over_that_cannot_be_read(bounds: str) -> None:
    with pytest.raises(AutoparError, match=r"fail-over: .*(time=2%|twice)"):
        parse_bounds(bounds)


def test_provenance_is_told_and_never_counts() -> None:
    provenance = replace(
        OLD.provenance, torch="9.9", imposed=("pin x=R",), status="optimal", gap_ppm=0
    )
    verdict = judge(compare(OLD, replace(OLD, provenance=provenance)))
    assert verdict.status == SAME
    assert verdict.difference.notes == (
        "planned with torch 2.13.0 before, 9.9 now",
        "imposed now: pin x=R",
        "the old plan is not proven optimal: as modelled, a plan up to 2.94 % faster may exist",
    )


def test_of_a_plan_of_which_nothing_is_proven_that_is_told() -> None:
    unknown = replace(OLD, provenance=replace(OLD.provenance, bound_ns=0, gap_ppm=1_000_000))
    note = "the new plan is not proven optimal: nothing is known of how good the best plan is"
    assert note in judge(compare(OLD, unknown)).difference.notes
    assert any("nothing is known" in text for text in cautions(unknown))
