"""What two plans were asked for: inputs, optimizer, cluster, memory limit."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.units import format_bytes, format_bytes_per_s, format_ns, format_percent
from autopar.plans.cluster_rates import ClusterRates
from autopar.plans.plan import Plan
from autopar.report.changes import Change, Topic, single

TOLERANCE_PERCENT = 1
"""Estimates, and the figures they start from, are equal if they differ by no more."""


def request_topics(old: Plan, new: Plan) -> tuple[Topic, ...]:
    """Topics whose cause is what was asked for; some may be empty."""
    a, b = old.structure, new.structure
    limits = old.estimates.memory_limit, new.estimates.memory_limit
    limit = single("memory limit", *map(format_bytes, limits)) if _moved(*limits) else ()
    inputs = tuple(
        change
        for what, before, after in _inputs(old, new)
        for change in single(what, before, after)
    )
    cluster = single("cluster", a.cluster, b.cluster)
    return (
        Topic("inputs", "request", inputs),
        Topic("optimizer", "request", single("optimizer", a.optimizer, b.optimizer)),
        Topic("cluster", "request", cluster + limit + _rates(old, new)),
    )


_ABSENT = "none"


def _inputs(old: Plan, new: Plan) -> Iterator[tuple[str, str, str]]:
    lines = old.structure.inputs, new.structure.inputs
    a, b = ({line.partition(":")[0]: line for line in side} for side in lines)
    if list(a.values()) != list(lines[0]) or list(b.values()) != list(lines[1]):
        before, after = ("; ".join(side) if side else _ABSENT for side in lines)
        yield "inputs", before, after
        return
    for name in {**a, **b}:
        yield f"input {name}", a.get(name, _ABSENT), b.get(name, _ABSENT)
    if set(a) == set(b):
        yield "order of the inputs", ", ".join(a), ", ".join(b)


def _rates(old: Plan, new: Plan) -> tuple[Change, ...]:
    a, b = old.estimates.cluster, new.estimates.cluster
    found = single("device", a.device, b.device)
    before, after = dict(_figures(a)), dict(_figures(b))
    for what in {**before, **after}:
        x, y = before.get(what), after.get(what)
        if not (isinstance(x, int) and isinstance(y, int)) or _moved(x, y):
            found += single(what, _text(what, x), _text(what, y))
    return found


_BANDWIDTH, _LATENCY, _START = "bandwidth", "latency", "start"
_KERNELS = "kernels"
_EFFICIENCY, _ROOT = "efficiency", "what lies between start and bandwidth"


def _figures(cluster: ClusterRates) -> Iterator[tuple[str, int | str]]:
    yield "memory of a device", cluster.memory_bytes
    yield f"{_BANDWIDTH} of a device's memory", cluster.memory_bytes_per_s
    for dtype, rate in sorted(cluster.flops_per_s.items()):
        yield f"FLOP/s in {dtype}", rate
    for name, figure in sorted(cluster.kernels.items()):
        yield f"{_KERNELS}: {name}", figure
    for k, link in enumerate(cluster.links):
        yield f"link of level {k}", link.name
        yield f"groups on level {k}", str(link.size)
        yield f"{_BANDWIDTH} of the link of level {k}", link.bytes_per_s
        yield f"{_LATENCY} of the link of level {k}", link.latency_ns
        yield f"{_START} of a collective on level {k}", link.start_ns
        yield f"{_EFFICIENCY} on level {k}", link.efficiency_ppm
        for each in link.measured:
            beside = f" with {each.shared} on each side" if each.shared else ""
            where = f"of {each.kind} among {each.ranks}{beside} on level {k}"
            yield f"{_START} {where}", each.start_ns
            yield f"{_BANDWIDTH} {where}", each.bytes_per_s
            yield f"{_ROOT} {where}", each.root_ns


def _text(what: str, figure: int | str | None) -> str:
    if figure is None or isinstance(figure, str):
        return figure or ""
    if what.startswith("memory"):
        return format_bytes(figure)
    if what.startswith(_BANDWIDTH):
        return format_bytes_per_s(figure)
    if what.startswith((_LATENCY, _START, _ROOT)):
        return format_ns(figure)
    if what.startswith(_EFFICIENCY):
        return format_percent(figure / 1e6)
    return f"{figure:.4g}"


def _moved(before: int, after: int) -> bool:
    return 100 * abs(after - before) > TOLERANCE_PERCENT * before
