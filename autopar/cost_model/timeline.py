"""A step as it passes: what is done in which order, and what is held meanwhile.

Ops come in the order of the graph. A redistribution of what an op makes for its own phase follows
the op; any other (parameters, inputs, activations that the backward phase reads) precedes the first
op that needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost_model.liveness import Residence
from autopar.ir.graph import Graph, Role
from autopar.ir.uses import Group
from autopar.plans.plan import OPTIMIZER, Held, MemoryCurve, Run

MAX_MOMENTS = 128
MAX_HELD = 24
IN_FLIGHT = "(buckets in flight)"
_PERIODS = 8
"""How many occurrences of an item are tried for the start of the next repetition."""


def positions(graph: Graph, group: Group) -> int:
    """The node at whose turn the tensor of `group` is redistributed."""
    root = graph.nodes[group.root.node]
    if root.role is Role.OP and root.phase is group.phase:
        return root.index
    return min(use.node for use in group.uses)


def order(
    graph: Graph, computed: Mapping[int, int], sent: Sequence[Group], optimizer_ns: int
) -> tuple[Run, ...]:
    """The nodes `computed`, and the redistributions of the groups `sent`, in order."""
    before: dict[int, list[str]] = defaultdict(list)
    after: dict[int, list[str]] = defaultdict(list)
    for group in sent:
        place = positions(graph, group)
        (after if place == group.root.node else before)[place].append(group.key)
    items = list[str]()
    for node in graph.nodes:
        items += before[node.index]
        if node.index in computed:
            items.append(node.key)
        items += after[node.index]
    return repeated([*items, *([OPTIMIZER] if optimizer_ns else [])])


def repeated(items: Sequence[str]) -> tuple[Run, ...]:
    """`items` as runs, each repeated as often as it follows itself."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        places[item].append(place)
    seen: dict[str, int] = defaultdict(int)
    found: list[Run] = []
    single: list[str] = []
    place = 0
    while place < len(items):
        item = items[place]
        while places[item][seen[item]] < place:
            seen[item] += 1
        following = places[item][seen[item] + 1 : seen[item] + 1 + _PERIODS]
        ways = [(_times(items, place, other - place), other - place) for other in following]
        times, period = max(ways, key=lambda way: (way[0] * way[1], way[0]), default=(1, 1))
        if times > 1:
            found += [Run(1, tuple(single))] if single else []
            found.append(Run(times, tuple(items[place : place + period])))
            single.clear()
            place += times * period
        else:
            single.append(item)
            place += 1
    return (*found, *([Run(1, tuple(single))] if single else []))


def _times(items: Sequence[str], place: int, period: int) -> int:
    """How often the `period` items from `place` on follow one another; 0 if once, so that a run
    that repeats is preferred."""
    body, times = items[place : place + period], 1
    while items[place + times * period : place + (times + 1) * period] == body:
        times += 1
    return times if times > 1 else 0


def memory_curve(held: Residence, durations_ns: Sequence[int], optimizer_ns: int) -> MemoryCurve:
    """What is held in up to `MAX_MOMENTS` equal stretches of the time that the nodes take, and
    while the optimizer steps. The node at position k takes `durations_ns[k]`."""
    length = len(durations_ns)
    live = {name: np.zeros(length + 1, np.int64) for name in ("kept", "saved", "transient")}
    for each in held.intervals:
        live[each.holder][each.first] += each.num_bytes
        live[each.holder][each.last + 1] -= each.num_bytes
    levels = np.stack([np.cumsum(change)[:-1] for change in live.values()])
    levels[2] += held.in_flight
    ends = np.cumsum(np.asarray(durations_ns, np.int64))
    total = int(ends[-1]) if length else 0
    moments = max(1, min(MAX_MOMENTS, total))
    marks = [total * (k + 1) // moments for k in range(moments)]
    first = np.searchsorted(marks, ends - durations_ns, side="right").clip(max=moments - 1)
    last = np.searchsorted(marks, ends, side="left").clip(max=moments - 1)
    together = levels.sum(axis=0)
    fullest: list[int | None] = [None] * moments
    for position in range(length):
        for k in range(int(first[position]), int(max(first[position], last[position])) + 1):
            best = fullest[k]
            if best is None or together[position] > together[best]:
                fullest[k] = position
    kept, saved, transient = (
        tuple(0 if p is None else int(level[p]) for p in fullest) for level in levels
    )
    rest = (0,) if optimizer_ns else ()
    time_ns = (*marks, *([total + optimizer_ns] if optimizer_ns else []))
    return MemoryCurve(time_ns, (*kept, *rest), (*saved, *rest), (*transient, *rest))


def peak_holders(held: Residence) -> tuple[Held, ...]:
    """The largest of what is held at the peak, by class of tensors."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in held.at_peak():
        state = "" if each.state is None else str(each.state)
        total = sums[each.key, state, each.holder]
        total[0], total[1] = total[0] + 1, total[1] + each.num_bytes
    if held.in_flight:
        sums[IN_FLIGHT, "", "transient"] = [1, held.in_flight]
    found = [
        Held(key, state, holder, count, size)
        for (key, state, holder), (count, size) in sums.items()
        if size
    ]
    return tuple(sorted(found, key=lambda h: (-h.num_bytes, h.key, h.state, h.holder)))[:MAX_HELD]
