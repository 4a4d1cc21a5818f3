"""The time of a step by op, collective and optimizer, the largest first, and its memory by holder.
Shares of time are of the step with nothing hidden, to which these times add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from autopar.ir.grouping import grouped
from autopar.ir.own_ops import original_key
from autopar.ir.units import format_bytes, format_bytes_of, format_share
from autopar.plans.estimates import Figures, Memory, StageEstimates
from autopar.plans.plan import Plan
from autopar.report.names import WHOLE_MODEL, short_op, tensor_name
from autopar.report.printed import table as new_table

HOLDER_TITLES: Mapping[str, str] = {
    "params": "parameters",
    "gradients": "gradients",
    "accumulated": "sums over microbatches",
    "optimizer": "optimizer states",
    "unsharded": "unsharded parameters",
    "saved": "activations saved for backward",
    "transient": "all else that is live",
}
"""By field of `plan.Memory`."""


CostKind = tuple[str, str, str]
"""What costs something, where, and in which phase."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`count` times `what` ("mm", "all_gather on tp", "optimizer") at `where`, a module, block or
    parameter by pattern; `time_ns` of all of them, which is the fraction `share` of the whole."""

    what: str
    where: str
    phase: str
    count: int
    time_ns: int
    share: float


def costs(estimates: StageEstimates) -> tuple[Cost, ...]:
    """All costs of a step that take time, added up by what they are and where."""
    sums = grouped((kind, figures) for kind, figures in _rows(estimates))
    rows = (
        (kind, sum(count for count, _ in each), sum(ns for _, ns in each))
        for kind, each in sums.items()
    )
    return costliest((row for row in rows if row[2]), estimates.added_up_ns)


def costliest(rows: Iterable[tuple[CostKind, int, int]], whole_ns: int) -> tuple[Cost, ...]:
    """Costs of each kind, count and time, as shares of `whole_ns`, the largest first."""
    priced = (Cost(*kind, count, ns, ns / max(1, whole_ns)) for kind, count, ns in rows)
    return tuple(sorted(priced, key=lambda c: (-c.time_ns, c.where, c.what, c.phase)))


def _rows(estimates: StageEstimates) -> Iterator[tuple[CostKind, tuple[int, int]]]:
    for op in estimates.ops.values():
        kind = short_op(op.op), op.module or WHOLE_MODEL, op.phase
        yield kind, (op.count, op.compute_ns)
    for key, sends in estimates.sends.items():
        where = tensor_name(estimates, key)
        for each in sends:
            yield (f"{each.kind} on {each.axis}", where, each.phase), (each.count, each.time_ns)
    yield ("optimizer", WHOLE_MODEL, ""), (1, estimates.optimizer_ns)


def held_by(memory: Memory) -> dict[str, int]:
    """Bytes by title; of sums over microbatches where there are any."""
    held = {title: getattr(memory, name) for name, title in HOLDER_TITLES.items()}
    if not memory.accumulated:
        del held[HOLDER_TITLES["accumulated"]]
    return held


def recompute_ns(estimates: StageEstimates) -> int:
    """How long backward takes in a step to recompute what is not saved."""
    return sum(op.compute_ns for key, op in estimates.ops.items() if original_key(key) != key)


# What a device holds, by holder, and what it has in the memory of its host.

HOST_LABEL = "on the host"

HOST_TITLES = {
    "params": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "offloaded": "offloaded activations",
}
"""The fields of `HostMemory` that hold something, as pages call them."""

_TOGETHER = "parameters and activations; the plan's version does not tell them apart"


@dataclass(frozen=True, slots=True)
class HostRow:
    """Bytes of a holder, of each device."""

    title: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HostUse:
    """What a device has in its host's memory, of its share `limit_bytes`; in a pipeline, a device
    of the rank that has most there. The fullest node has `node_bytes`, of all its `devices`. Limit
    and node are 0 if the plan does not say."""

    rows: tuple[HostRow, ...]
    num_bytes: int
    limit_bytes: int
    node_bytes: int
    devices: int

    @property
    def title(self) -> str:
        """Of the table."""
        node = f", and on a node of {self.devices} devices" if self.devices else ""
        return f"Memory of the host per device{node}"

    @property
    def text(self) -> str:
        """In words: of a device and of a node."""
        if not self.limit_bytes:
            return f"{format_bytes(self.num_bytes)} per device"
        node = f"{format_bytes(self.node_bytes)} on a node of {self.devices}"
        return f"{format_bytes_of(self.num_bytes, self.limit_bytes)} per device; {node}"


def host_use(estimates: Figures, plan: Plan) -> HostUse | None:
    """That of a plan, or a stage of it, with such `estimates`; None if it has nothing there."""
    held, memory = estimates.host_bytes, estimates.host_memory
    if not held:
        return None
    if not memory.total:
        return HostUse((HostRow(_TOGETHER, held),), held, 0, 0, 0)
    sizes = ((title, getattr(memory, name)) for name, title in HOST_TITLES.items())
    rows = tuple(HostRow(title, size) for title, size in sizes if size)
    return HostUse(rows, memory.total, memory.limit, _node_bytes(plan), memory.devices)


def _node_bytes(plan: Plan) -> int:
    """What the fullest node has: in a pipeline, devices of several ranks may share one."""
    estimates = plan.estimates
    devices = [0] * plan.world_size
    for each in plan.stages:
        first = each.structure.first_rank
        for k in range(first, first + each.structure.num_devices):
            devices[k] += each.estimates.host_bytes
    each = estimates.host_memory.devices
    return max(sum(devices[k : k + each]) for k in range(0, len(devices), each))


def memory_table(memory: Memory, limit: int) -> Table:
    """What a device holds at the peak, by holder."""
    table = new_table(("held by",), ("bytes", "of the limit"))
    for holder, num_bytes in held_by(memory).items():
        table.add_row(holder, format_bytes(num_bytes), format_share(num_bytes, limit))
    share = format_share(memory.total, limit)
    table.add_row("together", format_bytes(memory.total), share, style="bold")
    return table


def host_table(use: HostUse) -> Table:
    """By holder."""
    table = new_table(("held by",), ("bytes", *(["of the share"] if use.limit_bytes else [])))
    rows = [*((row.title, row.num_bytes) for row in use.rows), ("together", use.num_bytes)]
    for title, size in rows:
        share = [format_share(size, use.limit_bytes)] if use.limit_bytes else []
        table.add_row(title, format_bytes(size), *share, style="bold" * (title == "together"))
    if use.limit_bytes:
        of_node = format_share(use.node_bytes, use.limit_bytes * use.devices)
        table.add_row(f"on a node of {use.devices}", format_bytes(use.node_bytes), of_node)
    return table
