"""The schedule of a plan: everything that a step does, in the order in which it is done.

Ops come in the order of the graph. Communication starts where it can hide:

* Parameters are gathered in buckets, in the order of their first use, while the block before the
  one that uses them is computed (`ir.blocks`). Those that are gathered in another dtype are cast
  when the bucket starts.
* Gradients are sent in buckets once one is full, or half full when its block is over, but behind
  what is needed sooner (`PutOff`). They are waited for when the next block is over. Those that
  become gradients by a cast are cast when they have come.
* Partial tensors are reduced as soon as they are made: less is left to hold, and the reduction has
  time until the first use. Outputs of the graph get their final sharding at once.
* Offloaded tensors are waited for when the next block is over, and reloaded just in time
  (`host_copies`). Parameters on the host come two blocks ahead (`host_copies`). Their gradients are
  copied to the host as soon as they have the sharding in which they are stored.
* Everything else moves when an op needs it. Tensors saved for backward move after the last op of
  forward that reads them.

If backward is in two parts (`ir.passes.stages`), nothing is in flight between them. Messages that
the second part needs, and those of outputs of the graph, start in the second part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from autopar.errors import PlanMismatchError
from autopar.ir.blocks import blocks_of
from autopar.ir.buckets import is_bucketed
from autopar.ir.casts import casts_of
from autopar.ir.graph import OUTPUT_ROLES, Node, Phase, Ref, Role
from autopar.ir.schedule import (
    Compute,
    Event,
    Message,
    Schedule,
    Start,
    Take,
    Transfer,
    Update,
    Value,
    Wait,
)
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.layout import Layout
from autopar.plans.scheduling.bucketing import Bucket, Gathers, PutOff, starts_before, work
from autopar.plans.scheduling.host_copies import at_home, host_copies, loads, unload
from autopar.plans.scheduling.routes import Arc
from autopar.plans.scheduling.step_state import StepState, with_frees


def schedule(layout: Layout) -> Schedule:
    """The events of a step under the decisions of `layout`.

    PlanMismatchError, naming the tensor, if the decisions do not fit the graph.
    """
    last, microbatches = _microbatch(layout, is_last=True), layout.graph.microbatches
    if microbatches == 1:
        return last
    return replace(last, before=_microbatch(layout, is_last=False), microbatches=microbatches)


def _microbatch(layout: Layout, *, is_last: bool) -> Schedule:
    """The events of the last microbatch, or of one before, whose results stay on the device."""
    step = StepState(layout, is_last=is_last)
    forward = _Phase(step, Phase.FORWARD).run()
    saved, backward = step.saved_for_backward(), _Phase(step, Phase.BACKWARD)
    events, graph = backward.run(), layout.graph
    first, second = events[: backward.second], events[backward.second :]
    trained = {node.target for node in graph.with_role(Role.GRAD)} if is_last else ()
    params = tuple(n.index for n in graph.with_role(Role.PARAM) if n.target in trained)
    update = (Update(params),) if params else ()
    carried = () if graph.second_part is None else step.carried(second)
    left = frozenset(step.left())
    return with_frees(
        Schedule(forward, first, update, saved, left, weights=second, carried=carried)
    )


class _Phase:
    """Writes the events of one phase."""

    def __init__(self, step: StepState, phase: Phase) -> None:
        self.step, self.phase = step, phase
        self.routes, self.produced = step.routes, step.produced
        self.nodes = [node for node in step.graph.nodes if node.phase is phase]
        self.events: list[Event] = []
        self.coming: dict[Value, Message] = {}
        self.waited: set[Message] = set()
        self.open: dict[tuple[object, ...], Bucket] = {}
        self.leaving: dict[Value, list[tuple[Group, tuple[Arc, ...]]]] = defaultdict(list)
        self.under_way: dict[Message, int] = {}
        """Messages of what leaves the graph, or the device, with the block in which they
        started."""
        self.put_off = PutOff()
        blocks = blocks_of(step.graph, step.layout.mesh)
        self.blocks, self.block = blocks.of, -1
        self.casts, self.computed = casts_of(step.graph), set[int]()
        is_split = phase is Phase.BACKWARD and step.graph.second_part is not None
        self.end_of_part: float = step.graph.second_part or 0 if is_split else inf
        self.later: list[Group] = []
        """Groups whose tensor the first part of backward makes and the second uses, too."""
        self.second = -1
        """The first event of the second part."""
        self.due = step.when_saved() if phase is Phase.FORWARD else {}
        needs = step.in_order(self.nodes, self.due, self.blocks)
        self.gathers = Gathers(step.graph, step.routes, needs, partial(blocks.first_with, phase))
        self.starting = self._when_gathered()
        """Buckets of gathers, by the op before which they start."""
        self.copies = host_copies(step.layout, phase)
        self.loads: dict[Value, Message] = {}
        """Messages that bring parameters from the host, by the value that they bring."""
        for op, messages in loads(step.layout, phase).items():
            self.copies[op] += messages
            self.loads |= {message.transfers[0].target: message for message in messages}

    def run(self) -> tuple[Event, ...]:
        """All events, in order."""
        for node in self.nodes:
            if node.index >= self.end_of_part:
                self._go_on()
            if _is_computed(node):
                self._come_to(node)
            elif node.role is not Role.OP and node.role not in OUTPUT_ROLES:
                self.produced.add(self._given(node))
            for group, state in self.due.get(node.index, ()):
                self._need(group, state)
        outputs = [node for node in self.nodes if self._leaves(node)]
        for node in outputs:
            for group, state in self.step.reads[node.index]:
                self._advance(group, self.routes.path(group, state))
        self._flush()
        for node in outputs:
            for group, state in self.step.reads[node.index]:
                self._need(group, state)
                self._unload(group)
        self._flush()
        if self.second < 0:
            self.second = len(self.events)
        return tuple(self.events)

    def _go_on(self) -> None:
        """Begin with the second part: what the first has made for it is sent off."""
        assert set(self.coming.values()) <= self.waited, "something is under way between parts"
        self.end_of_part, self.second = inf, len(self.events)
        for group in self.later:
            self._send_off(group)

    def _given(self, node: Node) -> Value:
        """The value of a node that is given, such as a parameter or an input."""
        if node.role is Role.PARAM and node.target in self.step.streamed:
            return at_home(self.step.streamed[node.target], self.step.layout)
        ref = Ref(node.index)
        return Value(self.phase, ref, self.step.layout.output_state(ref))

    def _leaves(self, node: Node) -> bool:
        """Whether the node is an output of the graph, in this microbatch."""
        return node.role in OUTPUT_ROLES and self.step.is_last

    def _when_gathered(self) -> dict[int, list[int]]:
        ops: dict[int, list[Node]] = defaultdict(list)
        waited_on: dict[int, set[int]] = defaultdict(set)
        for node in self.nodes:
            if _is_computed(node):
                ops[self.blocks[node.index]].append(node)
                for group, state in self.step.reads.get(node.index, ()):
                    if not is_bucketed(self.step.graph, group):
                        path = self.routes.path(group, state)
                        waited_on[node.index].update(arc.collective.axis for arc in path)
        return starts_before(self.step.graph, self.gathers, ops, waited_on)

    def _enter(self, block: int) -> None:
        """Wait for messages that started before the previous block, or before this one if they have
        further to go. Then send buckets that are half full."""
        self.block = block
        for message, started in list(self.under_way.items()):
            if started < (block if self._goes_on(message) else block - 1):
                self._land(message)
        for key in [key for key, bucket in self.open.items() if bucket.is_half_full]:
            self._send(key)

    def _goes_on(self, message: Message) -> bool:
        """Whether a tensor in it leaves the graph in another sharding than it comes in."""
        return any(
            path[-1].target != transfer.target.state
            for transfer in message.transfers
            for _, path in self.leaving.get(transfer.target, ())
        )

    def _come_to(self, node: Node) -> None:
        """Compute the next op of the graph, except casts that are done, or that wait for a
        gradient."""
        for message in self.copies.get(node.index, ()):
            if message.transfers[0].target not in self.coming:
                self._start(message)
            if message.kind == "offload":
                self.under_way[message] = self.block
        while self.block < self.blocks[node.index]:
            self._enter(self.block + 1)
        is_next = node.index not in self.casts.gradients and node.index not in self.computed
        if is_next:
            self._read(node)
        # A gather in several steps waits for the first of them: behind no bucket that starts here.
        for start in (self._make_sources, self._gather):
            for place in self.starting.get(node.index, ()):
                start(place)
        # One of those gathers may have needed this very cast.
        if is_next and node.index not in self.computed:
            self._compute(node)

    def _read(self, node: Node) -> None:
        for group, state in self.step.reads.get(node.index, ()):
            self._need(group, state)

    def _compute(self, node: Node) -> None:
        """Compute an op, whose inputs are there."""
        self.events += self.put_off.before(work(self.step.graph, node))
        self.computed.add(node.index)
        refs = [Ref(node.index, output) for output in range(len(node.outputs))]
        makes = tuple(Value(self.phase, ref, self.step.layout.output_state(ref)) for ref in refs)
        self.events.append(Compute(node.index, self.step.values(node.index), makes))
        self.produced.update(makes)
        for group in self.step.maker_of.get(node.index, ()):
            self._send_off(group)

    def _cast(self, group: Group) -> None:
        """Compute the casts of a gradient that read it in a sharding in which it is there."""
        for use, state in zip(group.uses, self.step.layout.use_states(group), strict=True):
            is_due = use.node in self.casts.gradients and use.node not in self.computed
            if is_due and self.routes.value(group, state) in self.produced:
                self._compute(self.step.graph.nodes[use.node])

    def _need(self, group: Group, state: Sharding) -> None:
        """Make sure that the group's tensor is there in `state`."""
        root = self.step.graph.nodes[group.root.node]
        if root.index in self.casts.copies and self.routes.source(group) not in self.produced:
            self._read(root)
            self._compute(root)
        source = self.routes.source(group)
        if source in self.loads and source not in self.coming:
            self._start(self.loads[source])
        if source in self.coming:
            self._land(self.coming[source])
        for arc in self.routes.path(group, state):
            transfer = self.routes.transfer(group, arc)
            if transfer.target in self.produced:
                continue
            if transfer.target not in self.coming:
                self._begin(transfer)
            if transfer.target in self.coming:
                self._land(self.coming[transfer.target])
            if transfer.target not in self.produced:
                self._take(transfer, self.coming[transfer.target])
        value = self.routes.value(group, state)
        if value not in self.produced:
            raise PlanMismatchError(f"{group.key}: {root.name} is used before it is made")

    def _begin(self, transfer: Transfer) -> None:
        """Start the message that brings the target, whose source is there. A slice needs no
        message: its target is taken at once."""
        place = self.gathers.place_of.get(transfer.target)
        if place is not None:
            self._gather(place)
        elif transfer.collective.kind == "slice":
            self._take(transfer, None)
        else:
            self._start(Message((transfer,)))

    def _gather(self, place: int) -> None:
        """Start a bucket of gathers, unless it has started."""
        bucket = self.gathers.buckets[place]
        if bucket.transfers[0].target not in self.coming:
            self._make_sources(place)
            self._start(bucket.message())

    def _make_sources(self, place: int) -> None:
        """Make sure that the sources of a bucket are there, unless it has started."""
        for transfer in self.gathers.buckets[place].transfers:
            source, has_started = transfer.source, transfer.target in self.coming
            if source not in self.produced and not has_started:
                self._need(self.step.groups[source.ref, self.phase], source.state)

    def _start(self, message: Message) -> None:
        self.events.append(Start(message))
        for transfer in message.transfers:
            self.coming[transfer.target] = message

    def _land(self, message: Message) -> None:
        """Wait for a message, unless that is done."""
        if message in self.waited:
            return
        self.events += self.put_off.before_wait(message)
        self.waited.add(message)
        self.events.append(Wait(message))
        if message.transfers[0].target in self.gathers.place_of:
            return
        self.under_way.pop(message, None)
        for transfer in message.transfers:
            self._take(transfer, message)
        for transfer in message.transfers:
            for group, path in self.leaving.pop(transfer.target, ()):
                self._advance(group, path)

    def _take(self, transfer: Transfer, message: Message | None) -> None:
        self.events.append(Take(transfer, message))
        self.produced.add(transfer.target)

    def _send_off(self, group: Group) -> None:
        """Start the transfers of a tensor that was just made, as far as they can start at once."""
        nodes = self.step.graph.nodes
        ends = [*zip(group.uses, self.step.layout.use_states(group), strict=True)]
        if any(use.node >= self.end_of_part for use in group.uses):
            self.later.append(group)
        for use, state in ends:
            if use.node >= self.end_of_part:
                continue
            user, path = nodes[use.node], self.routes.path(group, state)
            if self._leaves(user) or use.node in self.casts.gradients:
                self._advance(group, path)
            elif user.role not in OUTPUT_ROLES:
                self._reduce(group, path)
        if group.crosses and group.phase is Phase.FORWARD:
            self._reduce(group, self.routes.path(group, self.step.layout.for_backward(group.root)))

    def _reduce(self, group: Group, path: Sequence[Arc]) -> None:
        """Start the reductions that `path` begins with."""
        for arc in path:
            if not arc.reduces:
                return
            transfer = self.routes.transfer(group, arc)
            if transfer.target not in self.produced and transfer.target not in self.coming:
                self._need(group, arc.source)
                self._begin(transfer)

    def _advance(self, group: Group, path: tuple[Arc, ...]) -> None:
        """Send an output of the graph on along `path`, up to where a message has to come first."""
        if self.routes.source(group) not in self.produced:
            return
        for arc in path:
            transfer = self.routes.transfer(group, arc)
            if transfer.target in self.produced:
                continue
            if arc.collective.kind == "slice":
                self._take(transfer, None)
                continue
            if transfer.target in self.gathers.place_of:
                return
            is_first = transfer.target not in self.leaving and transfer.target not in self.coming
            self.leaving[transfer.target].append((group, path))
            if is_first:
                self._post(transfer, arc)
            return
        self._cast(group)
        self._unload(group)

    def _unload(self, group: Group) -> None:
        """Start the copies of gradients to the host, if their parameters live there, as soon as
        they are there in the sharding in which they are stored."""
        for use, state in zip(group.uses, self.step.layout.use_states(group), strict=True):
            user, gradient = self.step.graph.nodes[use.node], self.routes.value(group, state)
            on_host = gradient._replace(on_host=True)
            leaves = self._leaves(user) and on_host in self.step.leaving(user)
            if leaves and gradient in self.produced and on_host not in self.coming:
                message = unload(self.step.streamed[user.target], self.step.layout, gradient)
                self._start(message)
                self.under_way[message] = self.block

    def _post(self, transfer: Transfer, arc: Arc) -> None:
        """Put a transfer of an output into a bucket, and send the bucket once it is full."""
        kind, axis = transfer.collective.kind, transfer.collective.axis
        dtype = self.step.graph.type_of(transfer.source.ref).dtype
        key = (kind, axis, dtype) if arc.shares else (transfer,)
        if key in self.open and not self.open[key].takes(arc):
            self._send(key)
        self.open.setdefault(key, Bucket()).add(transfer, arc)
        if self.open[key].is_full:
            self._send(key)

    def _send(self, key: tuple[object, ...]) -> None:
        message = self.put_off.add(self.open.pop(key))
        self.coming |= {transfer.target: message for transfer in message.transfers}
        self.under_way[message] = self.block

    def _flush(self) -> None:
        """Send all that is left, and wait for all of it."""
        while self.open or self.under_way:
            for key in list(self.open):
                self._send(key)
            self.events += self.put_off.before(inf)
            while self.under_way:
                self._land(next(iter(self.under_way)))


def _is_computed(node: Node) -> bool:
    return node.role is Role.OP and not node.view
