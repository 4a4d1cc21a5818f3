"""Time and memory of a schedule's events on one rank, with copies to and from its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from autopar.cost_model.moves import to_ns
from autopar.ir.casts import casts_of
from autopar.ir.graph import Phase, Ref, Role
from autopar.ir.grouping import grouped
from autopar.ir.mesh import HOST_LINKS, Cluster, Host
from autopar.ir.own_ops import is_result
from autopar.ir.redistribute import buffer_bytes
from autopar.ir.schedule import (
    Compute,
    Event,
    HostCopy,
    Message,
    Schedule,
    Start,
    Take,
    Transfer,
    Value,
)
from autopar.ir.sharding import Sharding
from autopar.ir.timeline import Carried
from autopar.ir.uses import groups
from autopar.plans.layout import Layout
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.host_copies import COPIES, copies_of, copy_key
from autopar.rules.table import record_of
from autopar.rules.work import scratch_bytes

GIVEN_ROLES = (Role.BUFFER, Role.INPUT, Role.TANGENT, Role.CONSTANT)
"""What is in memory from the start of a step to its end, beside parameters."""


def round_up(num_bytes: int, granule_bytes: int) -> int:
    """The next multiple of a granule."""
    return -(-num_bytes // granule_bytes) * granule_bytes


class PricedStep(NamedTuple):
    """One priced step of a route, or a collective that an op sends while it runs, which the host
    launches with the op. `in_bytes` are those of one rank."""

    kind: str
    axis: int
    in_bytes: int
    ns: int
    host_ns: int


class EventPrices:
    """`timeline.Prices` of one rank, in nanoseconds and bytes.

    By op: `compute` is its time, `launched` the time in which the host launches it, `sends` the
    collectives it sends while it runs. `steps` are those of each group and copy, by its key, and
    `updates` the optimizer's time for each parameter. `contention` is as in `hardware.Hardware`.
    Memory is allocated in multiples of `granule_bytes`."""

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        compute: Mapping[int, int],
        launched: Mapping[int, int],
        sends: Mapping[int, Sequence[PricedStep]],
        steps: Mapping[str, Sequence[PricedStep]],
        updates: Mapping[int, int],
        contention: Sequence[int],
        granule_bytes: int,
    ) -> None:
        self.contention, self.granule_bytes = contention, granule_bytes
        self.layout, self.graph = layout, layout.graph
        self.compute, self.launched, self.sends = compute, launched, sends
        self.steps, self.updates = steps, updates
        self._inside = {
            node: [(each.axis, each.ns) for each in collectives]
            for node, collectives in sends.items()
        }
        offloaded = {value for value in schedule.saved if value.on_host}
        on_device = {value._replace(on_host=False) for value in offloaded}
        reloaded = {value._replace(phase=Phase.BACKWARD) for value in on_device}
        self.saved = frozenset(schedule.saved) | on_device | reloaded
        self._buffers: dict[tuple[str, int], tuple[int, int]] = {}
        self._scratch: dict[str, int] = {}
        self._viewed = grouped(
            (use.node, (group, use, state))
            for group in groups(self.graph)
            for use, state in zip(group.uses, layout.use_states(group), strict=True)
            if len(use.chain) > 1
        )

    def given(self) -> list[Value]:
        """What is in memory from start to end, beside parameters."""
        return [
            Value(node.phase, ref, self.layout.output_state(ref))
            for node in self.graph.with_role(*GIVEN_ROLES)
            for ref in (Ref(node.index),)
        ]

    def compute_ns(self, node: int) -> int:
        return self.compute[node]

    def inside(self, node: int) -> Sequence[tuple[int, int]]:
        return self._inside.get(node, ())

    def message_ns(self, message: Message) -> int:
        return sum(self.steps[each.key][each.step].ns for each in message.transfers)

    def cut_ns(self, transfer: Transfer) -> int:
        return self.steps[transfer.key][transfer.step].ns

    def update_ns(self, params: Sequence[int]) -> int:
        return sum(self.updates[param] for param in params)

    def host_ns(self, event: Event) -> int:
        match event:
            case Compute(node):
                return self.launched[node]
            case Start(message):
                return sum(self.steps[each.key][each.step].host_ns for each in message.transfers)
            case Take(transfer, None):
                return self.steps[transfer.key][transfer.step].host_ns
            case _:
                return 0

    def held(self, value: Value) -> tuple[str, int]:
        holder = "transient"
        if is_result(self.graph.nodes[value.ref.node]) and value.state == self.layout.output_state(
            value.ref
        ):
            # It is in memory all the time.
            return holder, 0
        if value in self.saved:
            root = self.graph.nodes[value.ref.node]
            is_param = root.role is Role.PARAM or root.index in casts_of(self.graph).copies
            holder = "unsharded" if is_param else "saved"
        held = 0 if value.on_host else self.layout.held_bytes(value.ref, value.state)
        return holder, self.rounded(held)

    def rounded(self, num_bytes: int) -> int:
        """Bytes that the allocator takes for a tensor of `num_bytes`."""
        return round_up(num_bytes, self.granule_bytes)

    def carried(self, message: Message) -> Carried:
        buffers = [(each.copies.sent, *self._bytes(each)) for each in message.transfers]
        copied = sum(self.rounded(given) for is_copied, given, _ in buffers if is_copied)
        brought = sum(self.rounded(got) for _, _, got in buffers)
        if len(buffers) == 1:
            return Carried(0, copied, brought)
        joined = 0 if message.kind == "all_reduce" else sum(given for _, given, _ in buffers)
        return Carried(copied, self.rounded(joined), brought)

    def is_copied(self, transfer: Transfer, message: Message) -> bool:
        joined = len(message.transfers) > 1 and message.kind == "all_gather"
        return joined or transfer.copies.brought

    def scratch(self, node: int) -> int:
        done = self.graph.nodes[node]
        if done.key not in self._scratch:
            choice, sizes = self.layout.choice(done), self.layout.mesh.sizes
            held = scratch_bytes(self.graph, done, choice, sizes)
            self._scratch[done.key] = self.rounded(held)
        return self._scratch[done.key] + self._copied_views(node)

    def _copied_views(self, node: int) -> int:
        """Bytes of tensors that a reshape behind another view copies. That happens to redistributed
        tensors, whose order in memory is not that of the op's output."""
        held = 0
        for group, use, state in self._viewed.get(node, ()):
            views = [record_of(self.graph.nodes[view].op).reshapes for view in use.chain]
            is_copied = any(views) and not all(views[: views.index(True) + 1])
            if is_copied and state != self.layout.output_state(group.root):
                held += self.rounded(self.layout.held_bytes(group.root, state))
        return held

    def _bytes(self, transfer: Transfer) -> tuple[int, int]:
        """Bytes of a step's input and output buffer on the device."""
        if isinstance(transfer.collective, HostCopy):
            return self.held(transfer.source)[1], self.held(transfer.target)[1]
        known = transfer.key, transfer.step
        if known not in self._buffers:
            tensor, atoms = self.graph.type_of(transfer.source.ref), self.graph.atoms
            where = transfer.source.state, transfer.target.state, transfer.collective
            self._buffers[known] = buffer_bytes(tensor, atoms, *where, self.layout.mesh.sizes)
        return self._buffers[known]


# The time of copies to and from the host's memory.

_THOUSAND = 1000

_MAX_AXES = 2
_FAST = 1 / 20
"""The least bandwidth of a link to the host, as a part of the device memory's, for which offloading
is a decision on two mesh axes. Problems of two axes have many more columns, for which the dense
rows of two more resources are slow. Llama-8B on 8x8 within 18 GiB takes 40 CPU seconds of planning
instead of 20 on GH200, for a step that is 3 % shorter; on H100 54 instead of 17, for 0.9 %."""


def is_open(request: PlanRequest) -> bool:
    """Whether the plan decides what is in the host's memory, which for a CPU is the device's own.
    With residency "auto", links of any bandwidth do on two axes."""
    device, host = request.cluster.device, request.cluster.host
    is_fast = host.bytes_per_s >= _FAST * device.memory_bytes_per_s
    is_auto = request.options.residency == "auto"
    axes = len(request.mesh)
    has_own = request.cluster.has_host_memory
    return has_own and (axes <= 1 or (axes <= _MAX_AXES and (is_fast or is_auto)))


def copy_ns(num_bytes: int, host: Host) -> int:
    """Nanoseconds of a copy to or from the host. `Host.bytes_per_s` is the bandwidth of one device
    while all devices of its node copy at once."""
    return to_ns(host.latency_s + num_bytes / host.bytes_per_s)


def copies(layout: Layout, cluster: Cluster) -> dict[str, tuple[PricedStep]]:
    """The copies of offloaded activations and of parameters on the host, by their key."""
    launch_ns = to_ns(cluster.device.host_launch_s)

    def priced(kind: Literal["offload", "reload"], root: Ref, state: Sharding) -> tuple[PricedStep]:
        num_bytes = layout.held_bytes(root, state)
        link = layout.mesh.link_names.index(HOST_LINKS[COPIES.index(kind)])
        return (PricedStep(kind, link, num_bytes, copy_ns(num_bytes, cluster.host), launch_ns),)

    return {
        copy_key(tensor, layout, kind): priced(kind, tensor.root, layout.for_backward(tensor.root))
        for tensor in layout.offloaded_tensors
        for kind in COPIES
    } | {
        copy.key: priced(copy.kind, each.param, layout.output_state(each.param))
        for each in layout.streamed_params
        for copy in copies_of(each, layout)
    }


def host_contention(cluster: Cluster) -> tuple[int, int]:
    """How much compute and a copy to, and from, the host slow each other down, in thousandths, as
    in `hardware.Hardware`: a copy takes its part of the device memory's bandwidth."""
    part = min(1.0, cluster.host.bytes_per_s / cluster.device.memory_bytes_per_s)
    return round(part * _THOUSAND), round(part * _THOUSAND)
