"""What memory holds over a step: the content of the page's memory picture."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from autopar.plans.estimates import Held, Memory, MemoryCurve
from autopar.plans.plan import StagePlan
from autopar.report.costs import HOLDER_TITLES, HostUse, host_use
from autopar.report.placed import sharding_text

STACKED = {
    name: HOLDER_TITLES[name]
    for name in ("params", "optimizer", "gradients", "unsharded", "saved", "transient")
}
"""Fields of `plan.Memory` in the order in which they are stacked: what is always there below. Sums
over microbatches count as gradients, which they become."""

MAX_COLUMNS = 700
"""Points of the curve; each is the fullest of several if there are more."""


@dataclass(frozen=True, slots=True)
class Column:
    """From `start_ns` to `end_ns` at most `held` bytes, one figure per holder."""

    start_ns: int
    end_ns: int
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.held)


@dataclass(frozen=True, slots=True)
class HolderRow:
    """Bytes of a holder at the peak; `name` is a field of `plan.Memory`."""

    name: str
    title: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of each device: at the peak, over time, and what is largest at the peak, in words; and
    of its host, if anything is there."""

    limit: int
    peak: int
    holders: tuple[HolderRow, ...]
    columns: tuple[Column, ...]
    held: tuple[Held, ...]
    host: HostUse | None


def at_peak(memory: Memory, limit: int) -> MemoryUse:
    """What a device holds at the peak alone."""
    sizes = structs.asdict(memory) | {"gradients": memory.gradients + memory.accumulated}
    rows = tuple(HolderRow(n, title, sizes[n]) for n, title in STACKED.items())
    return MemoryUse(limit, memory.total, rows, (), (), None)


def memory_use(plan: StagePlan) -> MemoryUse:
    """The memory of a plan."""
    estimates, mesh = plan.estimates, plan.structure.mesh
    memory = estimates.memory
    return replace(
        at_peak(memory, estimates.memory_limit),
        columns=_thinned(_columns(estimates.memory_curve, memory)),
        held=tuple(
            structs.replace(
                each,
                state=sharding_text(each.state, mesh),
                holder=HOLDER_TITLES.get(each.holder, each.holder),
            )
            for each in estimates.peak_holders
        ),
        host=host_use(estimates, plan.whole),
    )


def _columns(curve: MemoryCurve, memory: Memory) -> list[Column]:
    columns: list[Column] = []
    start_ns = 0
    always = memory.params, memory.optimizer, memory.gradients + memory.accumulated
    for end_ns, *held in zip(curve.time_ns, curve.unsharded, curve.saved, curve.transient):
        if end_ns > start_ns:
            columns.append(Column(start_ns, end_ns, (*always, *held)))
            start_ns = end_ns
        elif columns and sum(always) + sum(held) > columns[-1].total:
            columns[-1] = Column(columns[-1].start_ns, columns[-1].end_ns, (*always, *held))
    return columns


def _thinned(columns: list[Column]) -> tuple[Column, ...]:
    each = -(-len(columns) // MAX_COLUMNS)
    groups = [columns[k : k + each] for k in range(0, len(columns), each)] if columns else []
    return tuple(
        Column(group[0].start_ns, group[-1].end_ns, max(group, key=lambda c: c.total).held)
        for group in groups
    )
