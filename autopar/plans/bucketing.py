"""Which transfers travel as one: gathers of parameters, and of copies of them, in the order of
their first use, and anything that leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph
from autopar.ir.schedule import Message, Transfer, Value
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.routes import Arc, Routes


class Bucket:
    """A message in the making."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._num_bytes = 0
        self._shares = True
        self._room = 0

    def takes(self, arc: Arc) -> bool:
        """Whether there is room for a transfer along `arc`."""
        fits = arc.num_bytes <= self._room
        return not self.transfers or (fits and self._shares and arc.shares)

    def add(self, transfer: Transfer, arc: Arc) -> None:
        """Put in a transfer along `arc`."""
        self.transfers.append(transfer)
        self._num_bytes += arc.num_bytes
        self._room = arc.bucket_bytes - self._num_bytes
        self._shares = arc.shares

    @property
    def num_bytes(self) -> int:
        """On the side that is not sharded."""
        return self._num_bytes

    @property
    def axis(self) -> int:
        """Whose links it takes."""
        return self.transfers[0].collective.axis

    @property
    def is_half_full(self) -> bool:
        """Whether it is worth a message of its own."""
        return not self._shares or self._num_bytes >= self._room

    @property
    def is_full(self) -> bool:
        """Whether there is room for nothing more."""
        return not self._shares or self._room <= 0

    def message(self) -> Message:
        """All of it."""
        return Message(tuple(self.transfers))


class Gathers:
    """The gathers of parameters, cast or not, in one phase, where `asked` says which states are
    asked for in which order, and by ops of which block (`ir.blocks`).

    Buckets are of one kind, axis, dtype and block, and of one number of gathers before and behind:
    one bucket never needs what another that needs it brings. `due` has those that are to start with
    a block: with the one before the one that they are for, and one block earlier for each gather
    behind, but no earlier than with the first of its part of the phase (`first_with`). Those for
    that one start when they are needed.
    """

    def __init__(
        self,
        graph: Graph,
        routes: Routes,
        asked: Iterable[tuple[int, tuple[Group, Sharding]]],
        first_with: Callable[[int], int],
    ) -> None:
        self.buckets: list[Bucket] = []
        self.place_of: dict[Value, int] = {}
        self.due: dict[int, list[int]] = {}
        casts = casts_of(graph)
        gathers = [
            (block, group, [arc for arc in path if arc.collective.kind == "all_gather"])
            for block, (group, state) in asked
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
