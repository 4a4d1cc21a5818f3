"""Which transfers share a message, and when gathers of parameters start."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod

from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Node
from autopar.ir.grouping import grouped
from autopar.ir.schedule import Message, Start, Transfer, Value
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.scheduling.routes import Arc, Routes


class Bucket:
    """Transfers that become one message."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.num_bytes = 0
        """Bytes on the side that is not sharded."""
        self._shares = True
        self._room = 0

    def takes(self, arc: Arc) -> bool:
        """Whether there is room for a transfer along `arc`."""
        fits = arc.num_bytes <= self._room
        return not self.transfers or (fits and self._shares and arc.shares)

    def add(self, transfer: Transfer, arc: Arc) -> None:
        """Put in a transfer along `arc`."""
        self.transfers.append(transfer)
        self.num_bytes += arc.num_bytes
        self._room = arc.bucket_bytes - self.num_bytes
        self._shares = arc.shares

    @property
    def axis(self) -> int:
        """The mesh axis whose links the message takes."""
        return self.transfers[0].collective.axis

    @property
    def is_half_full(self) -> bool:
        """Whether it is worth a message of its own."""
        return not self._shares or self.num_bytes >= self._room

    @property
    def is_full(self) -> bool:
        """Whether there is room for nothing more."""
        return not self._shares or self._room <= 0

    def message(self) -> Message:
        """The message with all transfers."""
        return Message(tuple(self.transfers))


class PutOff:
    """Messages that nobody needs soon, and that are still to start.

    Messages on the links of one axis come one after the other. One that ops wait for right away, or
    parameters of the next block, would come behind all of a bucket of gradients that is full just
    before. So that bucket starts before ops of more work than it has elements of two bytes. To read
    and write an element takes a part of the time in which a link sends it: the bucket is hardly
    later.
    """

    def __init__(self) -> None:
        self._left: dict[Message, float] = {}

    def add(self, bucket: Bucket) -> Message:
        """Put off the message of a bucket."""
        message = bucket.message()
        self._left[message] = bucket.num_bytes / 2
        return message

    def before(self, its_work: float) -> list[Start]:
        """The starts of those that come before an op of so much work (`work`), which is done then:
        all of them before endless work."""
        due = [message for message, left in self._left.items() if left < its_work]
        for message in due:
            del self._left[message]
        for message in self._left:
            self._left[message] -= its_work
        return [Start(message) for message in due]

    def before_wait(self, message: Message) -> list[Start]:
        """The starts of those that come before a wait for `message`: its own, and those on other
        axes, whose links might be idle meanwhile."""
        due = [each for each in self._left if each == message or each.axis != message.axis]
        for each in due:
            del self._left[each]
        return [Start(each) for each in due]


class Gathers:
    """The gathers of parameters, cast or not, in one phase. `gathered` has the sharding that each
    op needs, in order, with the block of the op (`ir.blocks`).

    A bucket is of one kind, axis, dtype and block, and of one number of gathers before and behind
    it. So no bucket needs the output of another that needs its own. `due` has the buckets that
    start with each block. They are for the next block, or for a later one: they start one block
    earlier for each gather behind them. None starts before the first block of its part of the phase
    (`first_with`); those for that block start when they are needed.
    """

    def __init__(
        self,
        graph: Graph,
        routes: Routes,
        gathered: Iterable[tuple[int, tuple[Group, Sharding]]],
        first_with: Callable[[int], int],
    ) -> None:
        self.buckets: list[Bucket] = []
        self.place_of: dict[Value, int] = {}
        self.due: dict[int, list[int]] = {}
        casts = casts_of(graph)
        gathers = [
            (block, group, [arc for arc in path if arc.collective.kind == "all_gather"])
            for block, (group, state) in gathered
            if casts.of_parameter(graph, group)
            for path in [routes.path(group, state)]
        ]
        most_behind: dict[Value, int] = {}
        for _, group, arcs in gathers:
            for behind, arc in enumerate(reversed(arcs)):
                target = routes.transfer(group, arc).target
                most_behind[target] = max(behind, most_behind.get(target, 0))
        last: dict[tuple[object, ...], int] = {}
        for block, group, arcs in gathers:
            for before, arc in enumerate(arcs):
                transfer = routes.transfer(group, arc)
                if transfer.target not in self.place_of:
                    behind = most_behind[transfer.target]
                    dtype = graph.type_of(group.root).dtype
                    key = arc.collective.axis, dtype, before, behind, block
                    if key not in last or not self.buckets[last[key]].takes(arc):
                        last[key] = len(self.buckets)
                        self.buckets.append(Bucket())
                        first = first_with(block)
                        if block > first:
                            due = max(first, block - 1 - behind)
                            self.due.setdefault(due, []).append(last[key])
                    self.buckets[last[key]].add(transfer, arc)
                    self.place_of[transfer.target] = last[key]


# When gathers of parameters start in the block that hides them (`ir.blocks`).
#
# Messages on the links of one mesh axis come one after the other. If no op of a block waits for a
# message on an axis, all gathers that are due there start with the block. The links are then never
# idle while there is something to gather. Otherwise gathers start after the messages that ops wait
# for, where the longest compute follows, so that few messages wait for them.

_MATMULS_PER_ELEMENT = 400
"""Multiplications and additions that a GPU does while it reads and writes an element. On an H100 it
is 990 TFLOP/s to 3.35 TB/s at four bytes per element, on a B200 1,700 to 4.8."""


def starts_before(
    graph: Graph,
    gathers: Gathers,
    blocks: Mapping[int, Sequence[Node]],
    waited_on: Mapping[int, Collection[int]],
) -> dict[int, list[int]]:
    """The buckets of `gathers` that start before each op, after the messages that the op waits for.

    `blocks` has the ops of each block in order, `waited_on` the axes on which ops wait for
    messages.
    """
    starts: dict[int, list[int]] = defaultdict(list)
    for block, places in gathers.due.items():
        ops = blocks.get(block, ())
        by_axis = grouped((gathers.buckets[place].axis, place) for place in places)
        for axis, due in by_axis.items():
            intervals = _intervals(graph, ops, axis, waited_on)
            for place, op in zip(due, _spread(gathers, due, intervals), strict=False):
                starts[op].append(place)
    for due in starts.values():
        due.sort()
    return starts


def _intervals(
    graph: Graph, ops: Sequence[Node], axis: int, waited_on: Mapping[int, Collection[int]]
) -> list[tuple[int, float]]:
    """The intervals of a block, each up to the next op that waits for a message on `axis`, as
    (first op, time of all ops). Times are those of `work`."""
    intervals: list[tuple[int, float]] = []
    for node in ops:
        if not intervals or axis in waited_on.get(node.index, ()):
            intervals.append((node.index, 0.0))
        first, so_far = intervals[-1]
        intervals[-1] = first, so_far + work(graph, node)
    return intervals


def work(graph: Graph, node: Node) -> float:
    """The time of an op on one device, in elements that are read and written meanwhile. A random op
    has no matmul: dims of its inputs have nothing to do with those of its outputs."""
    num_elements = sum(prod(tensor.shape) for tensor in node.outputs)
    if node.random:
        return num_elements
    sizes = (graph.atoms[atom].size for atom in {factor.atom for factor in node.factors})
    return num_elements + prod(sizes) / _MATMULS_PER_ELEMENT


def _spread(
    gathers: Gathers, due: Sequence[int], intervals: Sequence[tuple[int, float]]
) -> list[int]:
    """The op before which each bucket of `due` starts, so that bytes are in proportion to work."""
    if not intervals:
        return []
    sizes = [gathers.buckets[place].num_bytes for place in due]
    ends = [*accumulate(work for _, work in intervals)]
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    scale = ends[-1] / max(1, sum(sizes))
    return [intervals[bisect_left(ends, middle * scale)][0] for middle in middles]
