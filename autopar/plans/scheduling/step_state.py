"""Which op needs which tensor in which sharding, which values are there already, and until when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from autopar.errors import PlanMismatchError
from autopar.ir.graph import OUTPUT_ROLES, Node, Phase, Ref, Role
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import is_result
from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    Message,
    Schedule,
    Start,
    Take,
    Value,
    Wait,
)
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, groups
from autopar.plans.layout import Layout
from autopar.plans.scheduling.host_copies import at_home, on_host
from autopar.plans.scheduling.routes import Routes

# When tensors are freed.


def with_frees(given: Schedule) -> Schedule:
    """`given`, with a `Free` after each event that is the last to need a value or message."""
    lasts: dict[Value | Message, int] = {}
    events = given.forward + given.backward + given.weights
    produced = set[Value | Message]()
    for place, event in enumerate(events):
        produced.update(_outputs(event))
        lasts |= dict.fromkeys((*_outputs(event), *_read(event)), place)
    produced -= given.outputs
    dead = grouped((place, held) for held, place in lasts.items() if held in produced)

    def freed(first: int, phase: Sequence[Event]) -> Iterator[Event]:
        for place, event in enumerate(phase, first):
            yield event
            if place in dead:
                yield Free(tuple(dead[place]))

    first, second = len(given.forward), len(given.forward) + len(given.backward)
    return replace(
        given,
        forward=tuple(freed(0, given.forward)),
        backward=tuple(freed(first, given.backward)),
        weights=tuple(freed(second, given.weights)),
    )


def needed_by(events: Sequence[Event], left: Iterable[Value]) -> tuple[Value, ...]:
    """The tensors that `events` read, or that are `left` after them, without those that they
    make."""
    read: dict[Value, None] = {}
    produced = set[Value | Message]()
    for event in events:
        read |= dict.fromkeys(x for x in _read(event) if isinstance(x, Value) and x not in produced)
        produced.update(_outputs(event))
    return tuple(read | dict.fromkeys(value for value in left if value not in produced))


def _outputs(event: Event) -> Sequence[Value | Message]:
    match event:
        case Compute():
            return event.makes
        case Start(message):
            return (message,)
        case Take(transfer):
            return (transfer.target,)
        case _:
            return ()


def _read(event: Event) -> Sequence[Value | Message]:
    """What an event reads. A collective reads its sources until it has come, unless they are copied
    for it."""
    match event:
        case Compute():
            return event.reads
        case Start(message):
            return [transfer.source for transfer in message.transfers]
        case Wait(message):
            sources = [transfer.source for transfer in message.transfers]
            return [message] if message.is_packed else [message, *sources]
        case Take(transfer, message):
            return (message or transfer.source,)
        case _:
            return ()


Need = tuple[Group, Sharding]
"""A tensor, and the sharding in which it is needed."""


class StepState:
    """What both phases of a microbatch, the last of its step or not, know: what each node needs,
    and what is there."""

    def __init__(self, layout: Layout, *, is_last: bool) -> None:
        self.layout = layout
        self.is_last = is_last
        self.graph = layout.graph
        self.routes = Routes(layout)
        nodes = self.graph.nodes
        self.groups = {(group.root, group.phase): group for group in groups(self.graph)}
        self.maker_of = grouped(
            (group.root.node, group)
            for group in self.groups.values()
            if group.phase is nodes[group.root.node].phase
        )
        needs = grouped(
            (use.node, (use.arg, (group, state)))
            for group in self.groups.values()
            for use, state in zip(group.uses, layout.use_states(group), strict=True)
        )
        self.reads: dict[int, list[Need]] = {
            node: [need for _, need in sorted(pairs, key=itemgetter(0))]
            for node, pairs in needs.items()
        }
        self.produced: set[Value] = set()
        self.streamed = {nodes[each.param.node].target: each for each in layout.streamed_params}
        """The parameters on the host, by name."""

    def values(self, node: int) -> tuple[Value, ...]:
        """The values that a node reads."""
        return tuple(self.routes.value(*need) for need in self.reads.get(node, ()))

    def leaving(self, node: Node) -> tuple[Value, ...]:
        """The values that leave the graph as `node`."""
        on_host = node.role is Role.GRAD and node.target in self.streamed
        return tuple(value._replace(on_host=on_host) for value in self.values(node.index))

    def crossing(self) -> list[Group]:
        """The groups of backward whose tensor is made by forward."""
        nodes = self.graph.nodes
        return [
            group
            for group in self.groups.values()
            if group.phase is Phase.BACKWARD
            and nodes[group.root.node].phase is Phase.FORWARD
            and nodes[group.root.node].role is not Role.CONSTANT
        ]

    def when_saved(self) -> dict[int, list[Need]]:
        """Per node, the tensors that are brought into the sharding in which they are saved once the
        node is done. It is the last op of forward that reads them."""
        needs: dict[int, list[Need]] = defaultdict(list)
        nodes = self.graph.nodes
        for group in self.crossing():
            forward = self.groups.get((group.root, Phase.FORWARD))
            if forward is not None:
                users = (u.node for u in forward.uses if nodes[u.node].role not in OUTPUT_ROLES)
                last = max((group.root.node, *users))
                needs[last].append((forward, self.layout.for_backward(group.root)))
        return needs

    def in_order(
        self, nodes: Sequence[Node], due: Mapping[int, list[Need]], blocks: Mapping[int, int]
    ) -> list[tuple[int, Need]]:
        """The needs of `nodes`, and those that are `due` after them, in order, each with the block
        of its op, which `blocks` has."""
        needs: list[tuple[int, Need]] = []
        block = 0
        for node in nodes:
            block = blocks.get(node.index, block)
            node_needs = (*self.reads.get(node.index, ()), *due.get(node.index, ()))
            needs += ((block, need) for need in node_needs)
        return needs

    def left(self) -> Iterator[Value]:
        """The values that are not freed: outputs of the graph, or the results of microbatches
        before the last."""
        if self.is_last:
            for node in self.graph.with_role(*OUTPUT_ROLES):
                yield from self.leaving(node)
            return
        for node in filter(is_result, self.graph.nodes):
            ref = Ref(node.index)
            yield Value(node.phase, ref, self.layout.output_state(ref))

    def carried(self, second: Sequence[Event]) -> tuple[Value, ...]:
        """The values from before the second part of backward that it needs, without tangents and
        constants, which all of backward has."""
        leaving = [v for node in self.graph.with_role(Role.GRAD) for v in self.leaving(node)]
        needed = needed_by(second, leaving if self.is_last else ())
        given = Role.TANGENT, Role.CONSTANT
        return tuple(v for v in needed if self.graph.nodes[v.ref.node].role not in given)

    def saved_for_backward(self) -> tuple[Value, ...]:
        """The values that forward saves for backward. PlanMismatchError if it has not made one of
        them."""
        host_values = {
            each.root: on_host(each, self.layout) for each in self.layout.offloaded_tensors
        }
        for each in self.layout.streamed_params:
            if each.backward is not None:
                host_values[each.param] = at_home(each, self.layout)
        saved = tuple(
            host_values.get(group.root, self.routes.source(group)) for group in self.crossing()
        )
        for value in saved:
            if value not in self.produced:
                root = self.graph.nodes[value.ref.node]
                raise PlanMismatchError(
                    f"{root.key}: kept in {value.state}, but the forward phase does not use it"
                )
        return saved
