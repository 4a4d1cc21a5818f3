"""The bill of a pipeline, from those of its stages: its step, and what each device holds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from autopar.cost_model.event_prices import GIVEN_ROLES, round_up
from autopar.cost_model.rates import cluster_rates
from autopar.cost_model.sends import MessageBytes
from autopar.ir.graph import Phase, Ref, Role
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Cluster
from autopar.ir.pipeline import Action, ActionSpan, Hop, Pass, PipelineSchedule, answers
from autopar.plans.estimates import (
    NOTHING_ON_HOST,
    Delay,
    Estimates,
    HeldBytes,
    HostMemory,
    Memory,
    MicrobatchMemory,
    Shared,
    StageEstimates,
)
from autopar.plans.layout import Layout
from autopar.plans.pipelines import simulate_pipeline


def add_up(
    actions: PipelineSchedule,
    stages: Sequence[StageEstimates],
    devices: Sequence[int],
    sends: Sequence[Delay],
    shared: Sequence[Shared],
    held: Sequence[Memory],
    cluster: Cluster,
) -> Estimates:
    """The estimates of a pipeline on `cluster` whose stages have so many devices each, of which
    those of a rank hold what `held` says. What ranks share at the end is communication that nothing
    hides."""
    simulated = simulate_pipeline(actions, stages, sends, shared)
    step_ns = simulated.step_ns
    rank = simulated.busy_ns.index(max(simulated.busy_ns))
    own = [stages[s] for s, at in actions.ranks.items() if at == rank]
    total = {name: sum(getattr(each, name) for each in own) for name in _ADDED}
    total["exposed_host_ns"] += sum(
        stages[a.stage].microbatch.action_ns for a in actions.rows[rank]
    )
    shared_ns = simulated.shared_ns[rank]
    total["communication_ns"] += shared_ns
    total["exposed_communication_ns"] += shared_ns
    useful = sum(
        each.mfu_ppm * each.step_ns * size for each, size in zip(stages, devices, strict=True)
    )
    everywhere = sum({at: devices[s] for s, at in actions.ranks.items()}.values())
    tokens = max(each.tokens for each in stages)
    on_host = _on_host(actions, stages, cluster)
    return Estimates(
        **total,
        memory_limit=own[0].memory_limit,
        step_ns=step_ns,
        bubble_ns=step_ns - simulated.busy_ns[rank] - shared_ns,
        cluster=cluster_rates(cluster),
        flops=sum(each.flops for each in stages),
        memory=max(held, key=lambda each: each.total),
        host_bytes=on_host.total,
        host_memory=on_host,
        tokens=tokens,
        tokens_per_s=tokens * 10**9 // step_ns if step_ns else 0,
        samples=0 if tokens else stages[0].samples,
        mfu_ppm=useful // (step_ns * everywhere) if step_ns else 0,
        stages=tuple(stages),
        delays=tuple(sends),
        shared=tuple(shared),
        devices=tuple(held),
    )


def _on_host(
    actions: PipelineSchedule, stages: Sequence[StageEstimates], cluster: Cluster
) -> HostMemory:
    """What a device has on its host, of the rank that has most there: of all its stages."""
    ranks: list[HostMemory] = []
    for rank in range(len(actions.rows)):
        own = [stages[stage].host_memory for stage in actions.stages_of(rank)]
        sums = {name: sum(getattr(each, name) for each in own) for name in _ON_HOST}
        ranks.append(HostMemory(**sums, limit=cluster.host.memory_bytes))
    most = max(ranks, key=lambda each: each.total)
    if not most.total:
        return NOTHING_ON_HOST
    return msgspec.structs.replace(most, devices=cluster.devices_of_node)


_ON_HOST = "params", "gradients", "optimizer", "offloaded"

_ADDED = (
    "compute_ns",
    "communication_ns",
    "optimizer_ns",
    "exposed_communication_ns",
    "hidden_communication_ns",
    "host_ns",
    "exposed_host_ns",
)
"""What a rank does is the sum of what it does for each of its stages."""

# What a device of each rank of a pipeline holds in a step, for all of its stages together.
#
# Its row of the table is gone through action by action. At each a device holds what is there all
# the time of every stage, what other microbatches keep as they wait for their backward in any of
# them, what the stage at work holds itself, and messages: those that were sent and are not read
# yet, and those that it has asked for, in the order in which the executor does
# (`runtime.program.mail`).


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage holds on its own: `memory` as its plan has it, and `microbatches` part by part;
    an allocator hands memory out in multiples of `granule_bytes`."""

    layout: Layout
    memory: Memory
    microbatches: MicrobatchMemory
    granule_bytes: int

    def there(self, roles: Collection[Role]) -> Iterator[tuple[tuple[Role, str], int]]:
        """Bytes of a device of what is there all the time in these roles, by role and name."""
        layout = self.layout
        for node in layout.graph.with_role(*roles):
            if node.role is not Role.PARAM or not layout.params[node.target].num_on_host:
                ref = Ref(node.index)
                num_bytes = layout.held_bytes(ref, layout.output_state(ref))
                yield (node.role, node.target), round_up(num_bytes, self.granule_bytes)


def device_memory(
    actions: PipelineSchedule,
    stages: Sequence[StageMemory],
    spans: Mapping[Action, ActionSpan],
    messages: Mapping[Hop, MessageBytes],
) -> tuple[Memory, ...]:
    """At its fullest moment, by rank, where actions start and end as `spans` say, and stages send
    each other `messages` for each microbatch."""
    message_bytes = _MessageBytes(actions, spans, messages)
    return tuple(
        _fullest(actions, stages, message_bytes, rank) for rank in range(len(actions.rows))
    )


def _fullest(
    actions: PipelineSchedule,
    stages: Sequence[StageMemory],
    message_bytes: _MessageBytes,
    rank: int,
) -> Memory:
    own = {stage: stages[stage] for stage in actions.stages_of(rank)}
    given = sum(dict(each for s in own.values() for each in s.there(GIVEN_ROLES)).values())
    behind = {Pass.FORWARD: Pass.BACKWARD}
    if actions.is_split:
        behind[Pass.BACKWARD] = Pass.WEIGHTS
    waiting, most = Counter[tuple[int, Pass]](), HeldBytes()
    for action, sent in zip(actions.rows[rank], message_bytes.held(rank), strict=True):
        stage, kind, _ = action
        waiting[stage, kind] -= kind is not Pass.FORWARD
        microbatches = own[stage].microbatches
        held = microbatches.parts[kind, actions.is_last(action)]
        held = held.plus(HeldBytes(transient=given - microbatches.given + sent))
        for (other, part), number in waiting.items():
            if number:
                held = held.plus(own[other].microbatches.waiting[part], number)
        most = max(most, held, key=sum)
        if kind in behind:
            waiting[stage, behind[kind]] += 1
    memories = [each.memory for each in own.values()]
    params = sum(each.params for each in memories)
    # A tied weight, with what belongs to it, is there once for all stages of a device.
    once = sum(dict(each for s in own.values() for each in s.there([Role.PARAM])).values())
    share = once / params if params else 0.0
    return Memory(
        params=once,
        gradients=once,
        optimizer=round(share * sum(each.optimizer for each in memories)),
        unsharded=most.unsharded,
        saved=most.saved,
        transient=most.transient,
        accumulated=sum(each.accumulated for each in memories),
    )


class _Sent(NamedTuple):
    """What a rank has sent `peer`, which `reads` it in its action number `place`."""

    peer: int
    place: int
    reads: Action
    num_bytes: int


_Message = tuple[Hop, int]
"""What goes along a hop, of a microbatch."""


class _MessageBytes:
    """What messages take on the ranks of a table."""

    def __init__(
        self,
        actions: PipelineSchedule,
        spans: Mapping[Action, ActionSpan],
        messages: Mapping[Hop, MessageBytes],
    ) -> None:
        self.actions, self.spans, self.messages = actions, spans, messages
        self.ends = grouped(
            ((stage, hop[2], is_source), hop)
            for hop in sorted(messages)
            for stage, is_source in ((hop[0], True), (hop[1], False))
        )
        """By stage and phase, along what it sends, or is sent something."""
        self.place = {action: k for row in actions.rows for k, action in enumerate(row)}

    def held(self, rank: int) -> Iterator[int]:
        """Bytes of a device, action by action of a row: of what it has sent, or handed itself, that
        is not read yet, and of what it has asked for, but for what the action reads."""
        row, table = self.actions.rows[rank], self.actions
        later = answers(table.rows, rank)
        peers = {table.ranks[hop[0]] for hop in self.messages if table.ranks[hop[1]] == rank}
        orders = {peer: deque(self._order(peer, rank)) for peer in sorted(peers)}
        here: dict[_Message, int] = {}
        under_way: list[_Sent] = []
        for k, action in enumerate(row):
            for reads in (action, *(each for each in row[k + 1 : k + 2] if each not in later)):
                for message in self._ends(reads, is_source=False):
                    order = orders[table.ranks[message[0][0]]]
                    # What was sent before it comes before it.
                    while message in order:
                        came = order.popleft()
                        here[came] = self.messages[came[0]].received
            for message in self._ends(action, is_source=False):
                del here[message]
                peer = table.ranks[message[0][0]]
                done = self.place[self._end(message, is_source=True)]
                under_way = [e for e in under_way if e.peer != peer or e.place > done]
            yield sum(here.values()) + sum(each.num_bytes for each in under_way)
            end = self.spans[action].end
            for message in self._ends(action, is_source=True):
                reads = self._end(message, is_source=False)
                peer, num_bytes = table.ranks[reads.stage], self.messages[message[0]].sent
                if peer == rank:
                    here[message] = num_bytes
                    continue
                # As the next thing is sent it is seen what has come.
                under_way = [
                    e for e in under_way if e.peer != peer or self.spans[e.reads].start >= end
                ]
                under_way.append(_Sent(peer, self.place[reads], reads, num_bytes))

    def _ends(self, action: Action, *, is_source: bool) -> list[_Message]:
        """What an action sends, or reads."""
        if action.kind is Pass.WEIGHTS:
            return []
        phase = Phase.FORWARD if action.kind is Pass.FORWARD else Phase.BACKWARD
        hops = self.ends.get((action.stage, phase, is_source), ())
        return [(hop, action.microbatch) for hop in hops]

    def _end(self, message: _Message, *, is_source: bool) -> Action:
        """The action that sends a message, or reads it."""
        (source, target, phase), microbatch = message
        kind = Pass.FORWARD if phase is Phase.FORWARD else Pass.BACKWARD
        return Action(source if is_source else target, kind, microbatch)

    def _order(self, peer: int, rank: int) -> Iterator[_Message]:
        """What a rank is sent by another one, one after the other; it asks itself for nothing."""
        return (
            message
            for action in (self.actions.rows[peer] if peer != rank else ())
            for message in self._ends(action, is_source=True)
            if self.actions.ranks[message[0][1]] == rank
        )
