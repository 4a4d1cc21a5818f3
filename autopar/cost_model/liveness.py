"""Bytes live on one rank at every point of a step, by a walk over the graph.

Parameters, their gradients and the optimizer's states are there all the time (gradients too: a loop
that accumulates keeps them through the forward phase). A tensor lives from the op that makes it to
its last use in either phase; a redistributed copy from the first use that needs it to the last one.
What is kept for backward, where that is not the tensor as it was made, lives from the first forward
use to the last backward use. A step between two states holds both. What buckets hold beside that
(`bucket_memory`) is added to the peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model.bucket_memory import in_flight_bytes
from autopar.cost_model.optimizer import find_optimizer
from autopar.ir.graph import Node, Phase, Ref, Role
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.layout import Layout
from autopar.plans.options import Options
from autopar.plans.plan import Memory
from autopar.rules.intra_op import scratch_bytes


@dataclass(frozen=True, slots=True)
class Interval:
    """A tensor of the class `key`, in `state`, that takes `num_bytes` from position `first` to
    `last`, both included; `holder` is the field of `Memory` it counts to."""

    first: int
    last: int
    num_bytes: int
    holder: str
    key: str
    state: Sharding | None


@dataclass(frozen=True, slots=True)
class Residence:
    """What one rank holds: `intervals` over the positions of the graph's nodes, the position
    `peak` where their sum is largest (the first of several), `in_flight` bytes of buckets that are
    added to it, and all that at the peak."""

    intervals: tuple[Interval, ...]
    peak: int
    in_flight: int
    memory: Memory

    def at_peak(self) -> tuple[Interval, ...]:
        return tuple(each for each in self.intervals if each.first <= self.peak <= each.last)


def residence(
    layout: Layout, mesh: Mesh, all_groups: Sequence[Group], options: Options
) -> Residence:
    """What is held on one rank over a step."""
    intervals = tuple(_intervals(layout, mesh, all_groups))
    peak = _peak(intervals, len(layout.graph.nodes))
    held: dict[str, int] = defaultdict(int)
    for interval in intervals:
        if interval.first <= peak <= interval.last:
            held[interval.holder] += interval.num_bytes
    params = optimizer = 0
    for node in layout.graph.with_role(Role.PARAM):
        storage = layout.params[node.target].storage
        local = layout.held_bytes(Ref(node.index), storage)
        params += local
        optimizer += find_optimizer(options.optimizer).states * local
    in_flight = in_flight_bytes(layout, mesh, all_groups)
    memory = Memory(
        params=params,
        gradients=params,
        optimizer=optimizer,
        kept=held["kept"],
        saved=held["saved"],
        transient=held["transient"] + in_flight,
    )
    return Residence(intervals, peak, in_flight, memory)


def _peak(intervals: Sequence[Interval], length: int) -> int:
    """The first position where the sum is largest."""
    change = [0] * (length + 1)
    for interval in intervals:
        change[interval.first] += interval.num_bytes
        change[interval.last + 1] -= interval.num_bytes
    live, largest, peak = 0, -1, 0
    for position in range(length):
        live += change[position]
        if live > largest:
            largest, peak = live, position
    return peak


def _intervals(layout: Layout, mesh: Mesh, all_groups: Sequence[Group]) -> list[Interval]:
    graph = layout.graph
    found: list[Interval] = []
    last_use: dict[tuple[Ref, Phase], int] = {}
    scratch: dict[str, int] = {}
    for group in all_groups:
        last_use[group.root, group.phase] = max(use.node for use in group.uses)
    for group in all_groups:
        found.extend(_copies(layout, group, last_use))
    for node in graph.nodes:
        if node.view or node.role in (Role.PARAM, Role.GRAD):
            continue
        if node.role is Role.OP:
            if node.key not in scratch:
                scratch[node.key] = _scratch(layout, mesh, node)
            if scratch[node.key]:
                found.append(
                    Interval(node.index, node.index, scratch[node.key], "transient", node.key, None)
                )
        for output in range(len(node.outputs)):
            ref = Ref(node.index, output)
            state = layout.pair(node)[1][output]
            held = layout.held_bytes(ref, state)
            saved = last_use.get((ref, Phase.BACKWARD)) if node.phase is Phase.FORWARD else None
            last = last_use.get((ref, node.phase), node.index)
            if saved is not None and layout.kept(ref) == state:
                found.append(Interval(node.index, saved, held, "saved", node.key, state))
            else:
                found.append(Interval(node.index, last, held, "transient", node.key, state))
    return found


def _scratch(layout: Layout, mesh: Mesh, node: Node) -> int:
    """Bytes that an op holds for itself while it exchanges."""
    return scratch_bytes(layout.graph, node, layout.choice(node), mesh.sizes)


def _copies(
    layout: Layout, group: Group, last_use: Mapping[tuple[Ref, Phase], int]
) -> list[Interval]:
    """The redistributed copies of a group's tensor."""
    root = layout.graph.nodes[group.root.node]
    source, found = layout.source(group), list[Interval]()
    spans: dict[Sharding, tuple[int, int]] = {}
    for use, state in zip(group.uses, layout.asked(group), strict=True):
        first, last = spans.get(state, (use.node, use.node))
        spans[state] = min(first, use.node), max(last, use.node)
    kept = layout.kept(group.root) if group.crosses and group.phase is Phase.FORWARD else source
    if kept != source:
        first = min(use.node for use in group.uses)
        held = layout.held_bytes(group.root, kept)
        holder = "kept" if root.role is Role.PARAM else "saved"
        last = last_use[group.root, Phase.BACKWARD]
        found.append(Interval(first, last, held, holder, root.key, kept))
    for state, (first, last) in spans.items():
        if state not in (source, kept):
            held = layout.held_bytes(group.root, state)
            found.append(Interval(first, last, held, "transient", root.key, state))
    through = {target for _, target in layout.routes.get(group.key, ())} - set(spans) - {kept}
    first = min(use.node for use in group.uses)
    for state in sorted(through):
        held = layout.held_bytes(group.root, state)
        found.append(Interval(first, first, held, "transient", root.key, state))
    return found
