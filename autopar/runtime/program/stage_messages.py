"""Messages between ranks of a pipeline in a step: parts of shards, from the ranks that hold a
tensor to those of the stage that reads it.

Messages from one rank to another arrive in the order of sending, which follows from the sender's
row of the pipeline schedule. The receiver posts receives in that order, one action ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autopar.ir.graph import Phase
from autopar.ir.passes.stages import StageLink
from autopar.ir.pipeline import Action, Pass, answers

RANDOM = "the state of random numbers"
"""The name of the random state that a stage sends to the next drawing one: once, after its first
microbatch, for the first action of the other."""

Rows = tuple[tuple[Action, ...], ...]
"""The actions of each rank of a pipeline, in order."""


class Awaited(NamedTuple):
    """A message along a link from a rank, for a microbatch, or once."""

    link: StageLink
    microbatch: int
    peer: int


def awaited(link: StageLink, microbatch: int, peer: int) -> Awaited:
    """The message that an action of a microbatch sends or reads along a link."""
    return Awaited(link, 0 if link.name == RANDOM else microbatch, peer)


class Channels(Protocol):
    """Channels between single ranks; `send` and `receive` return a work to wait for."""

    def break_off(self) -> None:
        """A step has failed: messages under way are lost, and none can follow them."""
        ...

    def send(self, target: int, tensor: Tensor) -> Any: ...

    def receive(self, source: int, tensor: Tensor) -> Any: ...


class PeerPart(NamedTuple):
    """The part of this rank's shard that it exchanges with `peer`, maybe itself: `slices`, one for
    each part of the tensor's dims."""

    peer: int
    slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class SendPlan:
    """This rank's end of a link: its shard of `shape` in every microbatch, which is `split` with a
    dim for each part. `legs` are the parts by peer."""

    link: StageLink
    shape: tuple[int, ...]
    split: tuple[int, ...]
    dtype: torch.dtype
    legs: tuple[PeerPart, ...]

    def part(self, shard: Tensor, leg: PeerPart) -> Tensor:
        """The part of `shard` for one peer, as a view if possible."""
        return shard.reshape(self.split)[leg.slices]

    def is_all(self, leg: PeerPart) -> bool:
        """Whether the whole shard is for one peer."""
        return prod(part.stop - part.start for part in leg.slices) == prod(self.split)


@dataclass(frozen=True)
class RankLinks:
    """The ends of all links on one rank, and the row of each rank in the pipeline schedule."""

    rank: int
    row_of: Mapping[int, int]
    outgoing: tuple[SendPlan, ...]
    incoming: tuple[SendPlan, ...]

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver) of this rank's messages to and from others."""
        return (
            (self.rank, leg.peer) if is_out else (leg.peer, self.rank)
            for send_plans, is_out in ((self.outgoing, True), (self.incoming, False))
            for send_plan in send_plans
            for leg in send_plan.legs
            if leg.peer != self.rank
        )


class Exchanges:
    """A rank's messages in each step in which ranks do the actions of `rows`; `own` is this rank's
    row. `reads` and `sends` have the send plans of each action. `orders` has the messages from each
    sender in order, `places` the index of each action in its row, and `answers` this rank's
    `pipeline.answers`."""

    def __init__(self, route: RankLinks, rows: Rows) -> None:
        self.route, self.rows = route, rows
        self.own = rows[route.row_of[route.rank]]
        self.answers = answers(rows, route.row_of[route.rank])
        self.first = {(a.stage, a.kind): a.microbatch for row in rows for a in reversed(row)}
        self.reads = {a: self._at(route.incoming, a, sends=False) for a in self.own}
        self.sends = {a: self._at(route.outgoing, a, sends=True) for a in self.own}
        self.places = [{action: k for k, action in enumerate(row)} for row in rows]
        self.incoming = {(each.link, leg.peer): (each, leg) for each in route.incoming
                         for leg in each.legs}  # fmt: skip
        peers = sorted({peer for _, peer in self.incoming} - {route.rank})
        self.orders = {peer: list(self._order(peer)) for peer in peers}

    def _order(self, peer: int) -> Iterator[Awaited]:
        """The messages from a rank, in order."""
        links = sorted(link for link, source in self.incoming if source == peer)
        return (
            awaited(link, action.microbatch, peer)
            for action in self.rows[self.route.row_of[peer]]
            for link in links
            if self._goes(link, action, sends=True)
        )

    def action_of(self, link: StageLink, microbatch: int, *, sends: bool) -> Action:
        """The action that sends a message along a link, or the one that reads it."""
        kind = Pass.FORWARD if link.phase is Phase.FORWARD else Pass.BACKWARD
        stage = link.source if sends else link.target
        first = self.first.get((stage, kind), microbatch)
        return Action(stage, kind, first if link.name == RANDOM else microbatch)

    def _goes(self, link: StageLink, action: Action, *, sends: bool) -> bool:
        """Whether an action sends, or reads, along a link."""
        stage = link.source if sends else link.target
        is_there = action.stage == stage
        return is_there and self.action_of(link, action.microbatch, sends=sends) == action

    def _at(self, send_plans: Sequence[SendPlan], action: Action, *, sends: bool) -> list[SendPlan]:
        return [each for each in send_plans if self._goes(each.link, action, sends=sends)]

    def place(self, rank: int, action: Action) -> int:
        """The index of an action in another rank's row."""
        return self.places[self.route.row_of[rank]][action]


@dataclass
class StageMessages:
    """The messages of one step. `awaiting(action, link, rank)` is the context of a wait: for a
    message along `link` from a rank, or with None for a rank to read one."""

    exchanges: Exchanges
    channels: Channels | None
    device: torch.device
    awaiting: Callable[[Action, StageLink | None, int], AbstractContextManager[None]]
    _here: dict[Awaited, Tensor] = field(default_factory=dict, init=False)
    """Messages of this rank to itself."""
    _posted: dict[Awaited, tuple[Any, Tensor]] = field(default_factory=dict, init=False)
    _under_way: dict[int, list[tuple[int, Any, Tensor]]] = field(default_factory=dict, init=False)
    """By receiver, the messages sent, each with the index of the action that reads it."""

    def __post_init__(self) -> None:
        self._rank = self.exchanges.route.rank
        self._num_posted = dict.fromkeys(self.exchanges.orders, 0)

    def expect(self, action: Action) -> None:
        """Post the receives of an action, and earlier ones from the same ranks."""
        for send_plan in self.exchanges.reads[action]:
            for leg in send_plan.legs:
                if leg.peer != self._rank:
                    self._ask(awaited(send_plan.link, action.microbatch, leg.peer))

    def _ask(self, target: Awaited) -> None:
        order = self.exchanges.orders[target.peer]
        while target not in self._posted:
            message = order[self._num_posted[target.peer]]
            self._num_posted[target.peer] += 1
            send_plan, leg = self.exchanges.incoming[message.link, message.peer]
            part = [part.stop - part.start for part in leg.slices]
            shape = send_plan.shape if send_plan.is_all(leg) else part
            buffer = torch.empty(shape, dtype=send_plan.dtype, device=self.device)
            assert self.channels is not None
            self._posted[message] = self.channels.receive(message.peer, buffer), buffer

    def take(self, action: Action) -> dict[str, Tensor]:
        """The tensors that an action reads from other stages, by name, once they have arrived.
        Their receives are posted (`expect`)."""
        received: dict[str, Tensor] = {}
        for send_plan in self.exchanges.reads[action]:
            shard: Tensor | None = None
            for leg in send_plan.legs:
                part = self._received(send_plan, leg, action.microbatch)
                if send_plan.is_all(leg):
                    shard = part.reshape(send_plan.shape)
                    break
                if shard is None:
                    shard = torch.empty(send_plan.shape, dtype=send_plan.dtype, device=self.device)
                shard.view(send_plan.split)[leg.slices] = part
            assert shard is not None
            received[send_plan.link.name] = shard
        return received

    def _received(self, send_plan: SendPlan, leg: PeerPart, microbatch: int) -> Tensor:
        link, exchanges = send_plan.link, self.exchanges
        message = awaited(link, microbatch, leg.peer)
        if leg.peer == self._rank:
            return self._here.pop(message)
        work, buffer = self._posted.pop(message)
        with self.awaiting(exchanges.action_of(link, microbatch, sends=False), link, leg.peer):
            work.wait()
        done = exchanges.place(leg.peer, exchanges.action_of(link, microbatch, sends=True))
        self._release(leg.peer, done)
        return buffer

    def _release(self, peer: int, done: int) -> None:
        """Release messages that a rank has read: all for its actions up to the one at `done`."""
        rest: list[tuple[int, Any, Tensor]] = []
        for read_at, work, tensor in self._under_way.pop(peer, []):
            if read_at <= done:
                self._wait_until_read(peer, read_at, work)
            else:
                rest.append((read_at, work, tensor))
        if rest:
            self._under_way[peer] = rest

    def give(self, action: Action, sent: Mapping[StageLink, Tensor]) -> None:
        """Send the tensors of an action that other stages read."""
        for send_plan in self.exchanges.sends[action]:
            for leg in send_plan.legs:
                part = send_plan.part(sent[send_plan.link], leg).contiguous()
                if leg.peer == self._rank:
                    self._here[awaited(send_plan.link, action.microbatch, leg.peer)] = part
                    continue
                read = self.exchanges.action_of(send_plan.link, action.microbatch, sends=False)
                read_at = self.exchanges.place(leg.peer, read)
                assert self.channels is not None
                work = self.channels.send(leg.peer, part)
                known = self._under_way.get(leg.peer, [])
                rest = (each for each in known if not each[1].is_completed())
                self._under_way[leg.peer] = [*rest, (read_at, work, part)]

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        for peer, under_way in sorted(self._under_way.items()):
            for read_at, work, _ in under_way:
                self._wait_until_read(peer, read_at, work)
        self._under_way.clear()

    def _wait_until_read(self, peer: int, read_at: int, work: Any) -> None:
        row = self.exchanges.rows[self.exchanges.route.row_of[peer]]
        with self.awaiting(row[read_at], None, peer):
            work.wait()
