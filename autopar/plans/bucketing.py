"""Which transfers travel as one: gathers of parameters in the order of their first use, and
anything that leaves."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.buckets import BUCKET_BYTES
from autopar.ir.graph import Graph, Role
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

    def takes(self, arc: Arc) -> bool:
        """Whether there is room for a transfer along `arc`."""
        room = self._num_bytes + arc.num_bytes <= BUCKET_BYTES
        return not self.transfers or (room and self._shares and arc.shares)

    def add(self, transfer: Transfer, arc: Arc) -> None:
        """Put in a transfer along `arc`."""
        self.transfers.append(transfer)
        self._num_bytes += arc.num_bytes
        self._shares = arc.shares

    @property
    def is_full(self) -> bool:
        """Whether there is room for nothing more."""
        return not self._shares or self._num_bytes >= BUCKET_BYTES

    def message(self) -> Message:
        """All of it."""
        return Message(tuple(self.transfers))


class Gathers:
    """The gathers of parameters in one phase, where `asked` says which states are asked for in
    which order.

    Buckets are of one kind, axis and dtype, and of one number of gathers before: one bucket never
    needs what another that needs it brings. `next` has the bucket behind each of its like.
    """

    def __init__(
        self, graph: Graph, routes: Routes, asked: Iterable[tuple[Group, Sharding]]
    ) -> None:
        self.buckets: list[Bucket] = []
        self.place_of: dict[Value, int] = {}
        self.next: dict[int, int] = {}
        last: dict[tuple[object, ...], int] = {}
        for group, state in asked:
            if graph.nodes[group.root.node].role is not Role.PARAM:
                continue
            dtype, before = graph.type_of(group.root).dtype, 0
            for arc in routes.path(group, state):
                if arc.collective.kind != "all_gather":
                    continue
                transfer = routes.transfer(group, arc)
                if transfer.target not in self.place_of:
                    key = arc.collective.axis, dtype, before
                    self.place_of[transfer.target] = self._add(last, key, transfer, arc)
                before += 1

    def _add(
        self,
        last: dict[tuple[object, ...], int],
        key: tuple[object, ...],
        transfer: Transfer,
        arc: Arc,
    ) -> int:
        if key not in last or not self.buckets[last[key]].takes(arc):
            self.buckets.append(Bucket())
            if key in last:
                self.next[last[key]] = len(self.buckets) - 1
            last[key] = len(self.buckets) - 1
        self.buckets[last[key]].add(transfer, arc)
        return last[key]
