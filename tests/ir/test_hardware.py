"""What communication costs, message by message, and the critical path: by hand, and of any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.hardware import Hardware, Leg, Record, Span, apportion, critical_path


@dataclass(frozen=True)
class Do:
    """One thing to do: `what` is "work", "communicate", "start" or "launch", with its time, or
    "wait" for message `number` of those started."""

    what: str
    ns: int = 0
    axis: int = 0
    number: int = 0


@dataclass
class Done:
    record: Record
    exposed_ns: int
    exposed_host_ns: int
    end_ns: int
    messages: list[int] = field(default_factory=list[int])
    """The places of the messages in what was to be done."""
    acts: list[int] = field(default_factory=list[int])
    launches: list[int] = field(default_factory=list[int])

    def path(self) -> tuple[Leg, ...]:
        return critical_path(self.record)

    def place(self, leg: Leg) -> int:
        """Of a leg in what was to be done."""
        places = {"device": self.acts, "links": self.messages, "host": self.launches}
        return places[leg.by][leg.number]


def do(things: Sequence[Do], contention: Sequence[int] = ()) -> Done:
    hardware = Hardware(contention)
    messages, acts, launches = list[int](), list[int](), list[int]()
    for place, thing in enumerate(things):
        match thing.what:
            case "start":
                assert hardware.start(thing.axis, thing.ns) == len(messages)
                messages.append(place)
                continue
            case "launch":
                launches.append(place)
                if hardware.launch(thing.ns) is None:
                    continue
            case "wait" if not messages:
                continue
            case "wait":
                hardware.wait(thing.number % len(messages))
            case "work":
                hardware.work(thing.ns)
            case _:
                hardware.communicate(thing.axis, thing.ns)
        acts.append(place)
    figures = hardware.exposed_ns, hardware.exposed_host_ns, hardware.now_ns
    return Done(hardware.finish(), *figures, messages, acts, launches)


_things = st.builds(
    Do,
    st.sampled_from(["work", "communicate", "start", "start", "wait", "launch"]),
    st.integers(0, 50),
    st.integers(0, 2),
    st.integers(0, 5),
)
STEPS = st.lists(_things, max_size=20)


@given(STEPS, st.lists(st.integers(0, 1000), max_size=3))
def test_hidden_and_exposed_is_all_there_is(things: list[Do], contention: list[int]) -> None:
    done = do(things, contention)
    asked, worked_ns = Counter[int](), 0
    for thing in things:
        if thing.what in ("start", "communicate"):
            asked[thing.axis] += thing.ns
        worked_ns += thing.ns * (thing.what == "work")
    axes = done.record.axes
    assert {axis: each.alone_ns for axis, each in axes.items()} == asked
    assert all(0 <= each.exposed_ns <= each.alone_ns for each in axes.values())
    assert sum(each.exposed_ns for each in axes.values()) == done.exposed_ns
    assert done.end_ns == worked_ns + done.exposed_ns + done.exposed_host_ns
    assert done.exposed_ns >= 0
    assert all(0 <= each.exposed_ns <= each.alone_ns for each in done.record.sendings)


@given(STEPS, st.lists(st.integers(0, 1000), max_size=3))
def test_the_critical_path_is_as_long_as_the_step(things: list[Do], contention: list[int]) -> None:
    done = do(things, contention)
    spans = [leg.span for leg in done.path()]
    assert sum(end - start for start, end in spans) == done.end_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(spans))
    assert not spans or spans[0].start_ns == 0


@given(STEPS)
def test_only_what_is_on_the_critical_path_counts(things: list[Do]) -> None:
    """All else may take no time at all, and the step takes as long."""
    done = do(things)
    kept = {done.place(leg) for leg in done.path()}
    rest = [thing if k in kept else replace(thing, ns=0) for k, thing in enumerate(things)]
    assert do(rest).end_ns == done.end_ns


def work(ns: int) -> Do:
    return Do("work", ns)


def start(ns: int, axis: int = 0) -> Do:
    return Do("start", ns, axis)


def wait(number: int) -> Do:
    return Do("wait", number=number)


def test_a_wait_is_for_what_is_in_the_way() -> None:
    """The second message is waited for from 10 on; until 14 the links are at the first one."""
    done = do([start(14), start(6), start(30, axis=1), work(10), wait(1)])
    assert [each.exposed_ns for each in done.record.sendings] == [4, 6, 0]
    assert done.record.axes == {0: (20, 10), 1: (30, 0)}
    assert done.path() == (Leg(Span(0, 14), "links", 0), Leg(Span(14, 20), "links", 1))


def test_a_slow_down_is_shared_by_contention() -> None:
    """Ten of work beside two messages, at k = 0.1 and 0.3: four more, one and three."""
    done = do([start(100), start(100, axis=1), work(10)], (100, 300))
    assert [each.exposed_ns for each in done.record.sendings] == [1, 3]
    assert done.end_ns == 14


def test_what_the_device_communicates_is_exposed_of_its_axis() -> None:
    done = do([Do("communicate", 7, 2), start(5, axis=2), work(9), wait(0)])
    assert done.record.axes == {2: (12, 7)}


def test_the_path_goes_back_to_who_started_the_message() -> None:
    """The device is in no one's way while the message it needs is on its way."""
    done = do([work(3), start(20), work(5), wait(0), work(2)])
    legs = [(*leg.span, leg.by) for leg in done.path()]
    assert legs == [(0, 3, "device"), (3, 23, "links"), (23, 25, "device")]


def test_a_message_that_came_in_time_is_on_no_path() -> None:
    done = do([start(5), work(6), wait(0), work(2)])
    assert [leg.by for leg in done.path()] == ["device", "device"]


def launch(ns: int) -> Do:
    return Do("launch", ns)


def test_the_device_waits_for_a_host_that_is_behind() -> None:
    """The second op is launched at 8, when the first is over since 2; the third at 16, in time."""
    done = do([launch(8), work(2), launch(8), work(20), launch(8), work(1)])
    assert (done.end_ns, done.exposed_host_ns, done.exposed_ns) == (29, 6, 0)
    assert [(*leg.span, leg.by, leg.number) for leg in done.path()] == [
        (0, 8, "host", 1), (8, 28, "device", 2), (28, 29, "device", 3),
    ]  # fmt: skip


def test_a_message_starts_when_the_host_has_launched_it() -> None:
    """While the device waits for the host, the links go on: of the first message nothing is left
    when it is asked for."""
    done = do([launch(9), start(5), launch(9), start(4), wait(0), wait(1)])
    assert [each.span for each in done.record.sendings] == [(0, 5), (9, 13)]
    assert (done.end_ns, done.exposed_host_ns, done.exposed_ns) == (13, 9, 4)


@given(STEPS)
def test_a_host_that_keeps_up_changes_nothing(things: list[Do]) -> None:
    """It launches each thing while the device is at the one before, which takes longer."""
    longer = [replace(thing, what="work", ns=thing.ns + 1) for thing in things]
    launched = [each for thing in longer for each in (launch(1), thing)]
    assert do(launched).end_ns == do(longer).end_ns


@given(STEPS, st.lists(st.integers(0, 300), max_size=3), st.integers(1, 3))
def test_a_slower_host_makes_no_step_shorter(
    things: list[Do], contention: list[int], times: int
) -> None:
    slower = [
        replace(thing, ns=times * thing.ns) if thing.what == "launch" else thing for thing in things
    ]
    assert do(slower, contention).end_ns >= do(things, contention).end_ns


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_parts_add_up(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == (total if sum(weights) else 0)
    whole = sum(weights) or 1
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight // whole) <= 1


def test_what_is_left_goes_to_those_that_lost_most() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(7, [10, 3, 1]) == [5, 2, 0]
    assert apportion(5, [0, 0]) == [0, 0]
