"""Schedules of a few events, played by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.ir.graph import Phase, Ref
from autopar.ir.redistribute import Collective, Copies
from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    HostCopy,
    Message,
    Start,
    Take,
    Transfer,
    Update,
    Value,
    Wait,
)
from autopar.ir.sharding import R, S, Sharding
from autopar.ir.timeline import Carried, held_at_peak, simulate_events

WHOLE, PIECE = Sharding((R,)), Sharding((S(0),))


def value(number: int, state: Sharding = WHOLE) -> Value:
    return Value(Phase.FORWARD, Ref(number), state)


def moved(number: int, axis: int = 0) -> Transfer:
    move, copies = Collective("all_gather", axis, S(0), R), Copies(sent=False, brought=False)
    return Transfer(f"x{number}", 0, value(number, PIECE), value(number), move, copies)


class Figures:
    """An op takes 10, a message 4 for each tensor in it, a slice 2, the optimizer 5. A tensor holds
    100, a piece of one 10, one on the host nothing. The host takes `launch_ns` for what it
    launches."""

    contention: Sequence[int] = ()
    launch_ns = 0

    def compute_ns(self, node: int) -> int:
        return 10

    def inside(self, node: int) -> Sequence[tuple[int, int]]:
        return [(0, 3)] if node == 99 else []

    def message_ns(self, message: Message) -> int:
        return 4 * len(message.transfers)

    def cut_ns(self, transfer: Transfer) -> int:
        return 2

    def update_ns(self, params: Sequence[int]) -> int:
        return 5

    def host_ns(self, event: Event) -> int:
        return self.launch_ns * isinstance(event, Compute | Start)

    def held(self, value: Value) -> tuple[str, int]:
        size = 0 if value.on_host else 100 if value.state == WHOLE else 10
        return "saved" if value.ref.node >= 50 else "transient", size

    def carried(self, message: Message) -> Carried:
        n = len(message.transfers)
        if message.transfers[0].target.on_host:
            return Carried(0, 0, 0)
        return Carried(0, 10 * n if n > 1 else 0, 100 * n)

    def is_copied(self, transfer: Transfer, message: Message) -> bool:
        return len(message.transfers) > 1

    def scratch(self, node: int) -> int:
        return 7 if node == 99 else 0


def times(*events: Event) -> tuple[list[tuple[int, int]], int, int]:
    found = simulate_events(events, (), Figures())
    return [tuple(span) for span in found.spans], found.exposed_ns, found.end_ns


def test_a_message_hides_behind_what_is_computed_meanwhile() -> None:
    first = Message((moved(1),))
    spans, exposed, end = times(Start(first), Compute(5, (), ()), Wait(first))
    assert spans == [(0, 4), (0, 10), (10, 10)]
    assert (exposed, end) == (0, 10)


def test_what_is_left_of_a_message_is_exposed() -> None:
    long = Message(tuple(moved(k) for k in range(4)))
    spans, exposed, end = times(Start(long), Compute(5, (), ()), Wait(long))
    assert spans == [(0, 16), (0, 10), (10, 16)]
    assert (exposed, end) == (6, 16)


def test_messages_of_one_axis_queue_and_those_of_two_do_not() -> None:
    here, behind, beside = (Message((moved(k, axis),)) for k, axis in ((1, 0), (2, 0), (3, 1)))
    spans, exposed, end = times(Start(here), Start(behind), Start(beside), Wait(behind))
    assert spans == [(0, 4), (4, 8), (0, 4), (0, 8)]
    assert (exposed, end) == (8, 8)


def test_slices_and_what_ops_send_are_exposed_and_the_optimizer_is_not() -> None:
    spans, exposed, end = times(Take(moved(1), None), Compute(99, (), ()), Update((0,)))
    assert spans == [(0, 2), (2, 15), (15, 20)]
    assert (exposed, end) == (5, 20)


def test_compute_and_a_message_slow_each_other_down() -> None:
    """Together they take the longer and so much of the shorter."""
    figures = Figures()
    figures.contention = (500,)
    short, long = (Message(tuple(moved(k) for k in range(n))) for n in (1, 4))
    for message, spans, exposed in (
        (short, [(0, 6), (0, 12), (12, 12)], 2),
        (long, [(0, 21), (0, 15), (15, 21)], 11),
    ):
        found = simulate_events((Start(message), Compute(5, (), ()), Wait(message)), (), figures)
        assert [tuple(span) for span in found.spans] == spans
        assert (found.exposed_ns, found.end_ns) == (exposed, 10 + exposed)


def test_a_step_of_short_ops_is_as_long_as_the_host_takes() -> None:
    """Launched at 0, 25, 50 and 75: the message starts at 25, and is waited for no longer."""
    figures, message = Figures(), Message((moved(1),))
    figures.launch_ns = 25
    events = (
        Compute(1, (), ()),
        Start(message),
        Compute(2, (), ()),
        Wait(message),
        Compute(3, (), ()),
    )
    found = simulate_events(events, (), figures)
    assert [tuple(span) for span in found.spans] == [
        (0, 10),
        (25, 29),
        (50, 60),
        (60, 60),
        (75, 85),
    ]
    assert (found.exposed_host_ns, found.exposed_ns, found.end_ns) == (55, 0, 85)


def test_a_message_that_nothing_waits_for_ends_after_the_device() -> None:
    spans, exposed, end = times(Start(Message((moved(1),))), Take(moved(2), None))
    assert spans == [(0, 4), (0, 2)]
    assert (exposed, end) == (2, 2)


def levels(*events: Event, given: Sequence[Value] = ()) -> list[tuple[int, int, int]]:
    return list(simulate_events(events, given, Figures()).live)


def test_what_an_op_makes_is_held_until_it_is_freed() -> None:
    made, saved = value(1), value(50)
    found = levels(
        Compute(5, (), (made, saved)), Compute(99, (made,), ()), Free((made,)),
        given=(value(9, PIECE),),
    )  # fmt: skip
    assert found == [(0, 100, 110), (0, 100, 117), (0, 100, 10)]


def test_what_one_message_brought_is_the_tensor_itself() -> None:
    alone = Message((moved(1),))
    taken = Take(moved(1), alone)
    found = levels(Start(alone), Wait(alone), taken, Free((alone,)), Free((taken.transfer.target,)))
    assert [transient for _, _, transient in found] == [100, 100, 100, 100, 0]


def test_what_travels_together_is_copied_in_and_cut_out() -> None:
    pair = Message((moved(1), moved(2)))
    one, two = (Take(transfer, pair) for transfer in pair.transfers)
    events = (
        Start(pair), Wait(pair), one, Free((one.transfer.target,)), two, Free((pair,)),
        Free((two.transfer.target,)),
    )  # fmt: skip
    assert [transient for _, _, transient in levels(*events)] == [20, 220, 300, 200, 300, 100, 0]


def test_what_is_held_at_the_peak_is_told_one_by_one() -> None:
    made = value(1)
    events = (Compute(99, (), (made,)), Free((made,)))
    found = held_at_peak(simulate_events(events, (), Figures()), (), Figures())
    assert [(each.what, each.num_bytes) for each in found] == [(made, 100), (events[0], 7)]


def copied(number: int) -> tuple[Message, Message]:
    """Tensor 50 and so on, away and back; the links have the numbers behind those of two axes."""
    there = value(number)._replace(on_host=True)
    back = value(number)._replace(phase=Phase.BACKWARD)
    as_it_is = Copies(sent=False, brought=False)
    away = Transfer(f"x{number}@offload", 0, value(number), there, HostCopy("offload", 2), as_it_is)
    home = Transfer(f"x{number}@reload", 0, there, back, HostCopy("reload", 3), as_it_is)
    return Message((away,)), Message((home,))


def test_copies_to_and_from_the_host_pass_beside_messages_and_one_another() -> None:
    (away, home), (other, _), sent = copied(50), copied(51), Message((moved(1),))
    spans, exposed, end = times(
        Start(away), Start(other), Start(home), Start(sent), Compute(5, (), ()), Wait(other)
    )
    assert spans == [(0, 4), (4, 8), (0, 4), (0, 4), (0, 10), (10, 10)]
    assert (exposed, end) == (0, 10)


def test_what_is_away_is_held_until_it_is_gone_and_from_when_it_is_sent_for() -> None:
    away, home = copied(50)
    (there,), (back,) = away.transfers, home.transfers
    found = levels(
        Compute(5, (), (there.source,)), Start(away), Wait(away), Take(there, away),
        Free((there.source, away)), Compute(6, (), ()), Start(home), Wait(home), Take(back, home),
        Free((home, there.target)), Compute(7, (back.target,), ()), Free((back.target,)),
    )  # fmt: skip
    assert [sum(each) for each in found] == [100] * 4 + [0] * 2 + [100] * 5 + [0]


@pytest.mark.parametrize("launch_ns", [0, 5, 25])
def test_turns_that_pass_alike_are_played_once(launch_ns: int) -> None:
    """As if they were played one by one: under contention, and whether the host is ahead, behind or
    falls behind."""
    figures = Figures()
    figures.launch_ns, figures.contention = launch_ns, (300,)
    one, long = Message((moved(1),)), Message(tuple(moved(k) for k in range(4)))
    made = value(60)
    microbatch = (
        Start(one), Compute(1, (), (made,)), Wait(one), Start(long), Compute(5, (), ()),
        Wait(long), Free((made, one, long)),
    )  # fmt: skip
    events = (*9 * microbatch, Compute(99, (), (made,)), Update((0,)))
    whole, found = (
        simulate_events(events, (), figures),
        simulate_events(events, (), figures, len(microbatch), 9),
    )
    assert len(found.repeated) >= 4 * len(microbatch) and not whole.repeated
    assert replace(found, spans=whole.spans, repeated=range(0)) == whole
    # Within the nanosecond to which each is rounded.
    for one_span, other in zip(found.spans, whole.spans, strict=True):
        assert one_span == pytest.approx(other, abs=1)
    assert held_at_peak(found, (), figures) == held_at_peak(whole, (), figures)


def test_turns_with_a_message_under_way_are_played_one_by_one() -> None:
    """What a turn starts the next one waits for: it may take longer and longer."""
    away = Message(4 * copied(50)[0].transfers)
    microbatch = (Compute(1, (), ()), Start(away))
    events = (*6 * microbatch, Compute(2, (), ()))
    assert simulate_events(events, (), Figures(), 2, 6) == simulate_events(events, (), Figures())


def test_turns_that_hold_more_and_more_are_played_one_by_one() -> None:
    microbatch = (Compute(1, (), (value(60),)), Take(moved(2), None))
    found = simulate_events(5 * microbatch, (), Figures(), 2, 5)
    assert found == simulate_events(5 * microbatch, (), Figures())
    assert sum(found.live[-1]) > sum(found.live[-3])
