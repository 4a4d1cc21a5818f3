"""That a graph is its schedule, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from torch import fx

from autopar.codegen.collectives import SENDS, WAIT
from autopar.codegen.emit import LocalGraph, _Generator
from autopar.codegen.local_graph import MEMBERS
from autopar.ir.schedule import Compute, Event, HostCopy, Schedule, Start, Take, Wait
from autopar.runtime.ops.host_copies import ARRIVED, LANDED, OFFLOAD, RELOAD
from autopar.runtime.program.program import Program
from tests.planned import kind_of

COPIES = {"offload": OFFLOAD, "reload": RELOAD}


@dataclass
class Written:
    """The schedules that a program was generated from, of its last turn (True) and of those before,
    and the event that each of its nodes was written for."""

    schedules: dict[bool, Schedule] = field(default_factory=dict)
    events: dict[fx.Node, Event] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Written]:
    """Notes what is written for each event while programs are generated."""
    found, original = Written(), _Generator._emit

    def emit(self: _Generator, local: LocalGraph, event: Event) -> None:
        found.schedules[self.is_last] = self.schedule
        last = next(iter(reversed(local.graph.nodes)), local.graph._root)
        original(self, local, event)
        node = last.next
        while node.op != "root":
            found.events[node] = event
            node = node.next

    with patch.object(_Generator, "_emit", emit):
        yield found


def check_order(written: Written, program: Program, axes: tuple[str, ...]) -> None:
    """Each local graph has the nodes of its events in the order of the schedule: one collective or
    copy, as it was scheduled, for each message that is started, one wait where it is waited for,
    and all of the rest between. What an op is given only to know that it is there, as the bias of a
    norm in backward, is dropped."""
    parts = [(program, written.schedules[True])]
    if program.before is not None:
        parts.append((program.before, written.schedules[False]))
    phases = [(part.forward, schedule.forward) for part, schedule in parts]
    phases += [
        (part.backward, schedule.backward) for part, schedule in parts if part.backward is not None
    ]
    for gm, events in phases:
        place = {event: k for k, event in enumerate(events)}
        met: list[int] = []
        by_event: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if node in written.events and node.op == "call_function":
                at = place[written.events[node]]
                met.append(at)
                by_event.setdefault(at, []).append(node)
        assert met == sorted(met)
        for k, event in enumerate(events):
            check_event(event, by_event.get(k, []), axes)


def check_event(event: Event, nodes: list[fx.Node], axes: tuple[str, ...]) -> None:
    sent = [node for node in nodes if node.target in SENDS]
    waits = [node for node in nodes if node.target is WAIT]
    match event:
        case Start(message) if isinstance(message.transfers[0].collective, HostCopy):
            assert [node.target for node in nodes] == [COPIES[message.kind]]
        case Wait(message) if isinstance(message.transfers[0].collective, HostCopy):
            copy = message.transfers[0].collective
            expected = LANDED if isinstance(copy, HostCopy) and copy.is_read_there else ARRIVED
            assert [node.target for node in nodes] == [expected]
        case Start(message) | Wait(message) if not nodes:
            assert all(transfer.key.startswith("param:") for transfer in message.transfers)
        case Start(message):
            (issued,) = sent
            assert (kind_of(issued), issued.args[-1]) == (message.kind, axes[message.axis])
            assert issued.meta[MEMBERS] == len(message.transfers)
            assert issued is nodes[-1] and not waits
        case Wait():
            assert nodes == waits and len(waits) == 1
        case Take():
            assert not sent and not waits
        case Compute():
            assert len(waits) >= len(sent)
        case _:
            assert not nodes
