"""What the events of a schedule take and hold on one rank, under the prices that the solver saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.cost_model.moves import layout_copies
from autopar.ir.graph import Ref, Role
from autopar.ir.redistribute import buffer_bytes
from autopar.ir.schedule import Message, Schedule, Transfer, Value
from autopar.ir.timeline import Carried
from autopar.plans.layout import Layout
from autopar.rules.intra_op import scratch_bytes

_MEMORY = (Role.BUFFER, Role.INPUT, Role.TANGENT, Role.CONSTANT)


class Step(NamedTuple):
    """One step of a route as it is billed."""

    kind: str
    axis: int
    in_bytes: int
    ns: int


class _Buffers(NamedTuple):
    """Bytes given to and got from a step, and whether it copies either to lay it out."""

    given: int
    got: int
    copies_given: bool
    copies_got: bool


class EventPrices:
    """`timeline.Prices`: `compute` has the time of each op, `inside` what each sends while it runs,
    `steps` those of each group by its key, `updates` the optimizer's time for each parameter."""

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        compute: Mapping[int, int],
        inside: Mapping[int, Sequence[Step]],
        steps: Mapping[str, Sequence[Step]],
        updates: Mapping[int, int],
    ) -> None:
        self.layout, self.graph = layout, layout.graph
        self.compute, self.steps, self.updates = compute, steps, updates
        self.inside = {node: sum(each.ns for each in found) for node, found in inside.items()}
        self.saved = frozenset(schedule.saved)
        self._buffers: dict[tuple[str, int], _Buffers] = {}
        self._scratch: dict[str, int] = {}

    def given(self) -> list[Value]:
        """What is there from the start, beside parameters, and stays."""
        return [
            Value(node.phase, ref, self.layout.made(ref))
            for node in self.graph.with_role(*_MEMORY)
            for ref in (Ref(node.index),)
        ]

    def compute_ns(self, node: int) -> int:
        return self.compute[node]

    def inside_ns(self, node: int) -> int:
        return self.inside.get(node, 0)

    def message_ns(self, message: Message) -> int:
        return sum(self.steps[each.key][each.step].ns for each in message.transfers)

    def cut_ns(self, transfer: Transfer) -> int:
        return self.steps[transfer.key][transfer.step].ns

    def update_ns(self, params: Sequence[int]) -> int:
        return sum(self.updates[param] for param in params)

    def held(self, value: Value) -> tuple[str, int]:
        holder = "transient"
        if value in self.saved:
            root = self.graph.nodes[value.ref.node]
            holder = "kept" if root.role is Role.PARAM else "saved"
        return holder, self.layout.held_bytes(value.ref, value.state)

    def carried(self, message: Message) -> Carried:
        buffers = [self._of(transfer) for transfer in message.transfers]
        copies = sum(each.given for each in buffers if each.copies_given)
        brought = sum(each.got for each in buffers)
        if len(buffers) == 1:
            return Carried(0, copies, brought)
        joined = 0 if message.kind == "all_reduce" else sum(each.given for each in buffers)
        return Carried(copies, joined, brought)

    def is_copied(self, transfer: Transfer, message: Message) -> bool:
        joined = len(message.transfers) > 1 and message.kind == "all_gather"
        return joined or self._of(transfer).copies_got

    def scratch(self, node: int) -> int:
        done = self.graph.nodes[node]
        if done.key not in self._scratch:
            choice = self.layout.choice(done)
            self._scratch[done.key] = scratch_bytes(
                self.graph, done, choice, self.layout.mesh.sizes
            )
        return self._scratch[done.key]

    def _of(self, transfer: Transfer) -> _Buffers:
        known = transfer.key, transfer.step
        if known not in self._buffers:
            tensor, atoms = self.graph.type_of(transfer.source.ref), self.graph.atoms
            where = transfer.source.state, transfer.target.state, transfer.collective
            given, got = buffer_bytes(tensor, atoms, *where, self.layout.mesh.sizes)
            copies = layout_copies(tensor, atoms, *where, self.layout.mesh.sizes)
            self._buffers[known] = _Buffers(given, got, bool(copies.sent), bool(copies.brought))
        return self._buffers[known]
