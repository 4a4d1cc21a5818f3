"""The trace of a step, and the layout in time that it and the page are drawn from."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.plans.estimates import CollectiveTotal, OpTotal
from autopar.plans.order import OPTIMIZER, Run
from autopar.plans.plan import Plan
from autopar.report import trace
from autopar.report.timeline import timeline
from autopar.report.trace import BLOCKS, COMPUTE, CRITICAL, FIRST_AXIS, chrome_trace
from tests.redone import repriced
from tests.report.plans import MS, renamed, stepped_plan, undisturbed

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-405b.plan.json"


def traced(plan: Plan) -> list[dict[str, Any]]:
    return msgspec.json.decode(chrome_trace(plan.stages[0]))["traceEvents"]


def ns(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end. Microseconds are written with three decimals at most."""
    start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
    assert event["ts"] == start / 1000 and event["dur"] == duration / 1000
    return start, start + duration


def check_format(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What "Trace Event Format" asks for; the bars of each thread, which must not overlap."""
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    counted = -1.0
    for event in events:
        assert event["ph"] in "XCM" and event["pid"] == 0 and isinstance(event["name"], str)
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
        elif event["ph"] == "C":
            assert event["ts"] > counted, "counters in order of time"
            counted = event["ts"]
            assert all(type(value) is int for value in event["args"].values())
    for bars in threads.values():
        spans = [ns(bar) for bar in bars]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads) <= set(named) and len(set(named.values())) == len(named)
    return threads


def total(bars: list[dict[str, Any]]) -> int:
    return sum(ns(bar)[1] - ns(bar)[0] for bar in bars)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("plan", [stepped_plan(), Plan.load(EXAMPLE)], ids=["by hand", "405B"])
def test_events_add_up_to_the_bill(plan: Plan) -> None:
    estimates = plan.estimates
    threads = check_format(traced(undisturbed(plan)))
    by_device = [
        each
        for key, found in estimates.stages[0].sends.items()
        for each in found
        if key in estimates.stages[0].ops or each.kind == "slice"
    ]
    assert all(before["ts"] < after["ts"] for before, after in pairwise(threads[CRITICAL]))
    own_ns = estimates.compute_ns + estimates.optimizer_ns
    assert total(threads[COMPUTE]) == own_ns + sum(each.time_ns for each in by_device)
    for k, axis in enumerate(sorted(axis.name for axis in plan.structure.only.mesh)):
        sent = [each for each in estimates.stages[0].collectives if each.axis == axis]
        device = [each for each in by_device if each.axis == axis]
        bars = threads[FIRST_AXIS + k]
        assert total(bars) == sum(e.time_ns for e in sent) - sum(e.time_ns for e in device)
        assert sum(bar["args"]["bytes"] for bar in bars) == (
            sum(e.num_bytes for e in sent) - sum(e.num_bytes for e in device)
        )
    slowed = check_format(traced(plan))
    for thread, bars in threads.items():
        is_busy = thread in (COMPUTE, FIRST_AXIS, FIRST_AXIS + 1)
        assert not is_busy or total(slowed[thread]) >= total(bars)
    waits = [bar for bar in slowed.get(FIRST_AXIS + 2, []) if bar["name"] == "waiting for the host"]
    assert total(waits) == pytest.approx(estimates.exposed_host_ns, rel=1e-2)
    end = max(ns(bar)[1] for bars in slowed.values() for bar in bars)
    assert end == total(slowed[BLOCKS]) == total(slowed[CRITICAL])
    exposed = [
        bar["args"].get("exposed (ns)", 0)
        for thread, bars in slowed.items()
        for bar in bars
        if thread != CRITICAL
    ]
    # Ops of a key take the same time here, and what hides behind them may differ by that.
    assert sum(exposed) == pytest.approx(estimates.exposed_communication_ns, rel=1e-6)
    assert end == pytest.approx(estimates.step_ns, rel=1e-3)


def test_what_is_hidden_is_drawn_beside_what_hides_it() -> None:
    """Two gathers of 5 ms are started at once, and computed 8 ms with while the second is under
    way: the device waits for the first, and 2 ms of the second are left then."""
    plan = stepped_plan()
    sends = {"w@forward": (CollectiveTotal("all_gather", "dp", "forward", 2, 2, 10 * MS),)}
    ops = {"mm": OpTotal("m", "mm", "forward", 1, 3 * MS, 0, 0, 0)}
    items = "start 0 w@forward", "start 0 w@forward", "wait 0 w@forward", "mm", "wait 0 w@forward"
    estimates = repriced(
        plan.estimates, ops=ops, sends=sends, order=(Run(1, items),), optimizer_ns=0
    )
    step = timeline(msgspec.structs.replace(plan, estimates=estimates).stages[0])
    spans = [(bar.part.what, bar.start_ns // MS, bar.end_ns // MS) for bar in step.bars]
    assert spans == [("all_gather", 0, 5), ("all_gather", 5, 10), ("mm", 5, 8)]
    assert step.end_ns == 10 * MS
    assert step.axes == {"dp": (10 * MS, 7 * MS), "tp": (0, 0)}


def test_an_event_says_what_it_is() -> None:
    events = traced(stepped_plan())
    down = next(e for e in events if e["name"] == "mm" and "down" in e["args"]["module"])
    assert down["args"] == {
        "key": "model.layers.*.mlp.down/mm",
        "module": "model.layers.*.mlp.down",
        "op": "aten.mm.default",
        "reads": [
            "model.layers.*.mlp.up/mm [S(1) on tp, S(0) on dp]",
            "model.layers.*.norm/mul [S(0) on dp]",
        ],
        "makes": ["bfloat16[8, 1024] [P on tp, S(0) on dp]"],
    }
    reduced = next(e for e in events if e["name"] == "all_reduce")
    assert reduced["args"] == {
        "key": "model.layers.*.mlp.down/mm@forward",
        "module": "model.layers.*.mlp.down",
        "sharding": "[P on tp, S(0) on dp] to [S(0) on dp]",
        "collectives": 1,
        "bytes": 2 * 2**20,
        "exposed (ns)": 3 * MS // 4,
    }
    blocks = [e["name"] for e in events if e.get("cat") == "block"]
    assert blocks[0] == "model.layers.* forward 1 of 4"
    assert blocks[4:6] == ["forward and backward", "model.layers.* backward 1 of 4"]


def test_counters_hold_from_the_end_of_the_entry_before() -> None:
    counters = [e for e in traced(stepped_plan()) if e["ph"] == "C"]
    assert [e["ts"] for e in counters] == [0.0, 10_000.0, 20_000.0]
    assert [e["args"]["saved"] // 2**20 for e in counters] == [6, 12, 1]
    assert {e["args"]["optimizer"] // 2**20 for e in counters} == {16}


def test_a_trace_is_the_same_bytes_again() -> None:
    assert chrome_trace(stepped_plan().stages[0]) == chrome_trace(
        Plan.from_bytes(stepped_plan().to_bytes()).stages[0]
    )


def test_hostile_names_are_text() -> None:
    events = traced(renamed(stepped_plan(), "\x1b[31m<script>\u202e" + "x" * 10_000))
    check_format(events)
    texts = str(events)
    assert texts.isprintable() and len(texts) < 40_000


def test_too_long_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 5 forward, 3 of the head, four of 2 backward, the optimizer; all critical."""
    monkeypatch.setattr(trace, "MAX_BARS", 63)
    with pytest.raises(PlanError, match="64 entries"):
        chrome_trace(stepped_plan().stages[0])


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.sampled_from("abcd"), min_size=1)), max_size=4
    ),
    st.lists(st.integers(0, 50), min_size=6, max_size=6),
)
def test_occurrences_share_totals_without_a_rest(
    runs: list[tuple[int, list[str]]], figures: list[int]
) -> None:
    """However items repeat, the bars of an item add up to its totals, and stretches follow one
    another."""
    plan = stepped_plan()
    ops = {
        key: OpTotal("m", key, "forward", 1, figure, 0, 0, 0) for key, figure in zip("ab", figures)
    }
    sends = {
        "a": (CollectiveTotal("k", "dp", "forward", 1, figures[2], figures[3]),),
        "c": (CollectiveTotal("k", "tp", "forward", 1, figures[4], figures[5]),),
    }
    texts = {"c": "start 0 c", "d": "wait 0 c"}
    order = (
        *(Run(times, tuple(texts.get(item, item) for item in items)) for times, items in runs),
        Run(1, (OPTIMIZER,)),
    )
    step = timeline(
        msgspec.structs.replace(
            plan,
            estimates=repriced(plan.estimates, ops=ops, sends=sends, order=order),
        ).stages[0]
    )
    end = 0
    for stretch in step.stretches:
        assert stretch.start_ns == end
        for repetition in range(stretch.run.times):
            assert step.extent(stretch, repetition)[0] == end
            end = step.extent(stretch, repetition)[1]
        assert stretch.end_ns == end
        length = stretch.end_ns - stretch.start_ns
        assert all(ns <= length for ns in step.busy_ns(stretch).values())
    found: dict[tuple[str, str], int] = defaultdict(int)
    for bar in step.bars:
        found[bar.part.key, bar.part.what] += bar.duration_ns
    used = {item for _, items in runs for item in items}
    expected = {
        ("a", "a"): figures[0], ("b", "b"): figures[1], ("a", "k"): figures[3],
        ("c", "k"): figures[5], (OPTIMIZER, "update"): 4 * MS,
    }  # fmt: skip
    assert found == {
        each: ns for each, ns in expected.items() if ns and each[0] in {*used, OPTIMIZER}
    }
