"""The estimates of a pipeline from those of its stages: its step, and each device's memory."""

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
    """The estimates of a pipeline on `cluster`. Each stage has a number of `devices`, and each rank
    of the pipeline the memory in `held`. Communication `shared` at the end is not hidden."""
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
    """Host memory of a device, over all stages of its rank; of the rank with most of it."""
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
"""Estimates of a rank that are sums over its stages."""

# Memory of a device of each rank of a pipeline in a step, over all stages of the rank.
#
# It is added up action by action of the rank's row of the schedule. During each action a device
# holds the static memory of every stage, and the saved activations of other microbatches in flight
# in any of them. It also holds the memory of the stage at work, and messages. Messages are those
# sent and not read yet, and those whose receive is posted, in the executor's order
# (`runtime.program.mail`).


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a stage on its own: `memory` as in its plan, and `microbatches` part by part. The
    allocator's blocks are multiples of `granule_bytes`."""

    layout: Layout
    memory: Memory
    microbatches: MicrobatchMemory
    granule_bytes: int

    def there(self, roles: Collection[Role]) -> Iterator[tuple[tuple[Role, str], int]]:
        """Static bytes of a device for nodes of these roles, by role and name."""
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
    """Peak memory of a device of each rank. `spans` are the times of actions, and `messages` the
    bytes that stages send each other for a microbatch."""
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
    # A device has a tied weight, its gradient and its states once for all of its stages.
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
    """A message of a rank to `peer`, whose action `reads`, at `place` in its row, reads it."""

    peer: int
    place: int
    reads: Action
    num_bytes: int


_Message = tuple[Hop, int]
"""A hop, and the microbatch of which a message goes along it."""


class _MessageBytes:
    """Bytes of messages on the ranks of a pipeline schedule."""

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
        """The hops by stage, phase, and whether the stage is the source."""
        self.place = {action: k for row in actions.rows for k, action in enumerate(row)}

    def held(self, rank: int) -> Iterator[int]:
        """Bytes of a device's messages, per action of a row: those sent to others or to itself and
        not read yet, and posted receives. The messages that the action reads do not count."""
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
                    # Messages arrive in the order in which they are sent.
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
                # Sending the next message frees those that have arrived.
                under_way = [
                    e for e in under_way if e.peer != peer or self.spans[e.reads].start >= end
                ]
                under_way.append(_Sent(peer, self.place[reads], reads, num_bytes))

    def _ends(self, action: Action, *, is_source: bool) -> list[_Message]:
        """The messages that an action sends, or reads."""
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
        """The messages to `rank` from another one, `peer`, in order; none if they are the same."""
        return (
            message
            for action in (self.actions.rows[peer] if peer != rank else ())
            for message in self._ends(action, is_source=True)
            if self.actions.ranks[message[0][1]] == rank
        )
