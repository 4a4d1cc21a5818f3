"""The order of a step: what starts when, what is waited for, what is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_model.price import price
from autopar.errors import PlanMismatchError
from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    Message,
    Schedule,
    Start,
    Take,
    Update,
    Value,
    Wait,
)
from autopar.plans.decisions import make_stage
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.scheduling.bucketing import PutOff
from autopar.plans.scheduling.events import schedule
from autopar.plans.scheduling.step_state import with_frees
from tests.cost_model.test_price import LIMIT, random_solution
from tests.graphs import linear_step
from tests.layouts import laid_out
from tests.planned import on_h100, plan_for

LAYERS = 5
SHARDED = {
    r"param:w\d": "[S(0)]|[S(0)]",
    r"forward\.\d": "m",
    r"wgrad\.\d": "m",
    r"dgrad\.\d": "m",
}


def step(pins: dict[str, str], bucket_bytes: int) -> tuple[Graph, Schedule]:
    """A stack of layers on four devices, with buckets of at most so many bytes."""
    graph = linear_step(64, 32, 32, layers=LAYERS)
    plan = plan_for(graph, "4", pins, bucket_bytes)
    return graph, schedule(laid_out(graph, plan.structure.only))


def texts(graph: Graph, events: tuple[Event, ...]) -> Iterator[str]:
    for event in events:
        match event:
            case Compute(node):
                yield graph.nodes[node].key
            case Start(message):
                yield f"start {len(message.transfers)} {message.transfers[0].key}"
            case Wait(message):
                yield f"wait {message.transfers[0].key}"
            case _:
                pass


def test_parameters_are_gathered_while_the_block_before_is_computed() -> None:
    graph, found = step(SHARDED, 1)
    gather = "param:w{}@forward".format
    expected = [f"start 1 {gather(0)}"]
    for k in range(LAYERS):
        expected += [f"wait {gather(k)}"]
        expected += [f"start 1 {gather(k + 1)}"] * (k + 1 < LAYERS)
        expected += [f"forward.{k}"]
    assert list(texts(graph, found.forward))[: len(expected)] == expected


def test_small_parameters_are_gathered_together_and_cut_out_one_by_one() -> None:
    graph, found = step(SHARDED, 1 << 20)
    told = list(texts(graph, found.forward))
    assert told[:2] == [f"start {LAYERS} param:w0@forward", "wait param:w0@forward"]
    taken: list[str | int] = []
    for event in found.forward:
        match event:
            case Compute(node):
                taken.append(node)
            case Take(transfer) if transfer.key.startswith("param:"):
                taken.append(transfer.key)
            case _:
                pass
    ops = [node.index for node in graph.nodes if node.key.startswith("forward.")]
    assert taken == [x for k in range(LAYERS) for x in (f"param:w{k}@forward", ops[k])]


def test_gradients_leave_before_the_next_op_and_are_waited_for_when_the_next_block_is_over() -> (
    None
):
    """Behind parameters that this op waits for, and those of the next block."""
    graph, found = step(SHARDED, 1)
    told = list(texts(graph, found.backward))
    for k in range(LAYERS):
        made = told.index(f"wgrad.{k}")
        between = told[made + 1 : told.index(f"dgrad.{k}")] if k else told[made + 1 : made + 2]
        assert between[-1].startswith(f"start 1 wgrad.{k}@")
        assert all(text.split()[-1].startswith("param:") for text in between[:-1])
    under_way, most = 0, 0
    for text in told:
        if "wgrad" in text:
            under_way += text.startswith("start") - text.startswith("wait")
        most = max(most, under_way)
    assert most == 2 and under_way == 0
    waits = [text for text in told if text.startswith("wait wgrad")]
    assert waits == sorted(waits, reverse=True), "the oldest is waited for first"


def test_a_bucket_is_put_off_only_by_what_is_soon_over() -> None:
    @dataclass(frozen=True, eq=False)
    class Made:
        axis: int
        num_bytes: int = 200

        def message(self) -> Made:
            return self

    def bucket(axis: int) -> Any:
        return Made(axis)

    def started(starts: list[Start]) -> list[Message]:
        return [start.message for start in starts]

    put_off = PutOff()
    first, second, third = (put_off.add(bucket(axis)) for axis in (0, 1, 1))
    assert put_off.before(60) == [] and put_off.before(40) == []
    fourth = put_off.add(bucket(0))
    assert started(put_off.before(1)) == [first, second, third]
    fifth = put_off.add(bucket(1))
    assert started(put_off.before_wait(fifth)) == [fourth, fifth], "one is on another axis"
    assert put_off.before_wait(first) == [], "it has started"
    sixth = put_off.add(bucket(0))
    assert put_off.before_wait(first) == [], "they are on one axis"
    assert started(put_off.before(inf)) == [sixth]


def test_gradients_that_fill_no_bucket_leave_together_at_the_end() -> None:
    graph, found = step(SHARDED, 1 << 20)
    told = [t for t in texts(graph, found.backward) if "wgrad" in t]
    assert told[-2:] == [f"start {LAYERS} wgrad.{LAYERS - 1}@backward", "wait " + told[-1][5:]]


def test_the_optimizer_comes_last_with_every_parameter_that_has_a_gradient() -> None:
    graph, found = step({}, 1 << 20)
    (update,) = found.update
    assert isinstance(update, Update)
    assert update.params == tuple(node.index for node in graph.with_role(Role.PARAM))


def check(graph: Graph, found: Schedule) -> None:
    """What is read is there, what is freed is not read again, and all of it is freed once."""
    given = {
        (node.phase, node.index)
        for node in graph.nodes
        if node.role in (Role.PARAM, Role.INPUT, Role.TANGENT, Role.BUFFER, Role.CONSTANT)
    }
    there, ended = set[Value | Message](), set[Value | Message]()
    done: list[int] = []

    def read(value: Value) -> None:
        assert value in there or (value.phase, value.ref.node) in given

    def make(held: Value | Message) -> None:
        assert held not in there and held not in ended
        there.add(held)

    for event in found.events:
        match event:
            case Compute(node):
                done.append(node)
                for value in event.reads:
                    read(value)
                for value in event.makes:
                    make(value)
            case Start(message):
                for transfer in message.transfers:
                    read(transfer.source)
                make(message)
            case Wait(message):
                assert message in there
            case Take(transfer, None):
                read(transfer.source)
                make(transfer.target)
            case Take(transfer, message):
                assert message in there and transfer in message.transfers
                make(transfer.target)
            case Free(dead):
                assert there.issuperset(dead) and not found.outputs & set(dead)
                there.difference_update(dead)
                ended.update(dead)
            case Update():
                pass
    in_order = [n.index for n in graph.nodes if n.role is Role.OP and not n.view]
    phases = [n for p in Phase for n in in_order if graph.nodes[n].phase is p]
    casts = casts_of(graph)
    moved = casts.gradients.union(casts.copies)
    assert [n for n in done if n not in moved] == [n for n in phases if n not in moved]
    assert sorted(done) == sorted(phases)
    assert there <= found.outputs
    waits = [e.message for e in found.events if isinstance(e, Wait)]
    assert len(set(waits)) == len(waits)
    assert set(waits) == {e.message for e in found.events if isinstance(e, Start)}


def scheduled(seed: int, mesh: str, bucket_bytes: int) -> tuple[Graph, Schedule]:
    graph = linear_step(64, 32, 16, layers=3)
    cluster, laid = on_h100(mesh, bucket_bytes)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(laid)
    problem = price(request)
    structure = make_stage(request, problem, random_solution(problem, seed))
    return graph, schedule(laid_out(graph, structure))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 200),
    mesh=st.sampled_from(["2", "4", "2x4", "2x2x2"]),
    bucket_bytes=st.sampled_from([1, 3000, 1 << 20]),
)
def test_any_plan_makes_what_it_reads_and_frees_what_it_made(
    seed: int, mesh: str, bucket_bytes: int
) -> None:
    check(*scheduled(seed, mesh, bucket_bytes))


def test_first_steps_of_gathers_wait_behind_no_gather_of_the_next_block() -> None:
    """Links carry one message after the other: the op would wait for gathers that can hide."""
    seen = 0
    for seed in range(29, 40):
        _, found = scheduled(seed, "2x2x2", 1)
        between: list[list[Event]] = [[]]
        for event in found.events:
            if isinstance(event, Compute):
                between.append([])
            between[-1].append(event)
        for events in between:
            waits = {event.message for event in events if isinstance(event, Wait)}
            starts = [event.message for event in events if isinstance(event, Start)]
            ahead = set[int]()
            for message in starts:
                first = message.transfers[0]
                if not first.key.startswith("param:"):
                    continue
                if message in waits:
                    assert first.collective.axis not in ahead, (seed, first)
                else:
                    ahead.add(first.collective.axis)
                    seen += not waits.isdisjoint(starts)
    assert seen


def without(kind: type[Event]) -> Callable[[tuple[Event, ...]], tuple[Event, ...]]:
    def removed(events: tuple[Event, ...]) -> tuple[Event, ...]:
        place = next(k for k, event in enumerate(events) if isinstance(event, kind))
        return events[:place] + events[place + 1 :]

    return removed


@pytest.mark.parametrize("kind", [Compute, Start, Wait, Take, Free])
def test_a_schedule_without_an_event_is_seen(kind: type[Event]) -> None:
    graph, found = step(SHARDED, 1)
    check(graph, found)
    broken = Schedule(
        without(kind)(found.forward), found.backward, found.update, found.saved, found.outputs
    )
    with pytest.raises(AssertionError):
        check(graph, broken)


def test_what_forward_does_not_use_cannot_be_kept_otherwise() -> None:
    """A saved state that no forward op could have brought about names the tensor."""
    graph = linear_step(64, 32, 32, layers=2)
    layout = laid_out(graph, plan_for(graph, "4", SHARDED).structure.only)
    object.__setattr__(layout, "routes", {})
    with pytest.raises(PlanMismatchError, match="never leads from"):
        schedule(layout)


def test_a_phase_without_events_stays_empty() -> None:
    """A forward that computes nothing, as of a loss that is a parameter."""
    _, found = step({}, 1)
    alone = Schedule((), found.backward, (), (), found.outputs)
    assert with_frees(alone).forward == ()
    assert [e for e in with_frees(alone).backward if not isinstance(e, Free)] == [
        e for e in found.backward if not isinstance(e, Free)
    ]
