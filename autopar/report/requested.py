"""What two plans were made for: inputs, optimizer, cluster, memory limit, and the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autopar.ir.own_ops import original_key
from autopar.ir.units import format_bytes, format_bytes_per_s, format_ns, format_ppm
from autopar.plans.cluster_rates import ClusterRates
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.structure import Param
from autopar.report.changes import Change, ChangeItem, Topic, folded, gathered, single
from autopar.report.names import WHOLE_MODEL, op_place
from autopar.report.timeline import block_of

TOLERANCE_PERCENT = 1
"""Estimates, and the figures they start from, are equal if they differ by no more."""


def request_topics(old: Plan, new: Plan) -> tuple[Topic, ...]:
    """Topics whose cause is the request; some may be empty."""
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
    changes = single("device", a.device, b.device)
    before, after = (
        {what: (figure, text) for what, figure, text in _figures(cluster)} for cluster in (a, b)
    )
    for what in {**before, **after}:
        sides = before.get(what), after.get(what)
        x, y = (side[0] if side else None for side in sides)
        if not (isinstance(x, int) and isinstance(y, int)) or _moved(x, y):
            changes += single(what, *(side[1](side[0]) if side else "" for side in sides))
    return changes


def _figures(cluster: ClusterRates) -> Iterator[tuple[str, int | str, Callable[[Any], str]]]:
    """Name, figure and format of each rate. Texts differ, or numbers by more than a tolerance."""
    digits = "{:.4g}".format
    yield "memory of a device", cluster.memory_bytes, format_bytes
    yield "bandwidth of a device's memory", cluster.memory_bytes_per_s, format_bytes_per_s
    for dtype, rate in sorted(cluster.flops_per_s.items()):
        yield f"FLOP/s in {dtype}", rate, digits
    for name, figure in sorted(cluster.kernels.items()):
        yield f"kernels: {name}", figure, digits
    for k, link in enumerate(cluster.links):
        yield f"link of level {k}", link.name, str
        yield f"groups on level {k}", str(link.size), str
        yield f"bandwidth of the link of level {k}", link.bytes_per_s, format_bytes_per_s
        yield f"latency of the link of level {k}", link.latency_ns, format_ns
        yield f"start of a collective on level {k}", link.start_ns, format_ns
        yield f"efficiency on level {k}", link.efficiency_ppm, format_ppm
        for each in link.measured:
            beside = f" with {each.shared} on each side" if each.shared else ""
            where = f"of {each.kind} among {each.ranks}{beside} on level {k}"
            yield f"start {where}", each.start_ns, format_ns
            yield f"bandwidth {where}", each.bytes_per_s, format_bytes_per_s
            yield f"what lies between start and bandwidth {where}", each.root_ns, format_ns


def _moved(before: int, after: int) -> bool:
    return 100 * abs(after - before) > TOLERANCE_PERCENT * before


# What the model itself became: parameters, shapes and ops that only one of two plans has.

FINGERPRINT = "fingerprint"


def model_topics(old: Plan, new: Plan) -> tuple[Topic, ...]:
    """Topics whose cause is the model; some may be empty. Of plans in stages, whose ops are not
    those of the model alone, none is on ops but for those without a rule."""
    a, b = old.structure, new.structure
    params, x, y = [*_params(a.params, b.params)], old.stages[0], new.stages[0]
    staged = not have_ops_of_model(old, new)
    graph = single("class", a.model, b.model)
    graph += single("fingerprint of the graph", a.fingerprint, b.fingerprint)
    return tuple(
        Topic(title, "model", changes)
        for title, changes in (
            (FINGERPRINT, graph),
            (
                "parameters that are new or gone",
                folded(each for each in params if not (each.before and each.after)),
            ),
            (
                "parameters of another shape or type",
                folded(each for each in params if each.before and each.after),
            ),
            ("ops that are new or gone", () if staged else gathered(_unshared_ops(x, y))),
            ("ops done more or less often", () if staged else _recounted(x, y)),
            (
                "ops that make tensors of another shape or type",
                () if staged else gathered(_retyped(x, y)),
            ),
            ("ops without a sharding rule", _unknown(old, new)),
        )
    )


def have_ops_of_model(old: Plan, new: Plan) -> bool:
    """Whether the ops of both plans are those of the model: those of several stages are not."""
    return not any(plan.structure.is_pipeline for plan in (old, new))


def _params(old: Mapping[str, Param], new: Mapping[str, Param]) -> Iterator[ChangeItem]:
    """Parameters whose types differ, or that only one plan has."""
    for name in {**old, **new}:
        pair = [side.get(name) for side in (old, new)]
        before, after = (param.type_text if param else "" for param in pair)
        if before != after:
            weight = max(param.num_bytes for param in pair if param)
            yield ChangeItem("", name, before, after, weight)


def _unshared_ops(old: StagePlan, new: StagePlan) -> Iterator[ChangeItem]:
    """Ops that only one plan has, without copies of ops, which are a decision."""
    a, b = old.structure.ops, new.structure.ops
    for key in {**a, **b}:
        if not (key in a and key in b) and original_key(key) == key:
            plan = old if key in a else new
            place, name = op_place(key)
            total = plan.estimates.ops.get(key)
            text = _times(total) if total else "there"
            before, after = (text, "") if key in a else ("", text)
            yield ChangeItem(place, name, before, after, total.compute_ns if total else 0)


def _recounted(old: StagePlan, new: StagePlan) -> tuple[Change, ...]:
    """Ops whose counts differ, by repeated block: if a layer is added, all ops of its block
    change."""
    classes = Counter(
        (block_of(a.module) or WHOLE_MODEL, a.count, b.count)
        for _, a, b in _shared_totals(old, new)
        if a.count != b.count
    )
    return tuple(
        Change(block, count, f"{a} of each", f"{b} of each")
        for (block, a, b), count in sorted(classes.items(), key=lambda c: (-c[1], c[0]))
    )


def _retyped(old: StagePlan, new: StagePlan) -> Iterator[ChangeItem]:
    """Ops whose outputs are of other types."""
    for key, a, b in _shared_totals(old, new):
        before, after = (", ".join(kind for kind, _ in total.outputs) for total in (a, b))
        if before != after:
            place, name = op_place(key)
            yield ChangeItem(place, name, before, after, max(a.compute_ns, b.compute_ns))


def _shared_totals(old: StagePlan, new: StagePlan) -> Iterator[tuple[str, OpTotal, OpTotal]]:
    """(key, old totals, new totals) of the ops on which both plans decide."""
    return (
        (key, total, new.estimates.ops[key])
        for key, total in old.estimates.ops.items()
        if key in new.estimates.ops and key in old.structure.ops and key in new.structure.ops
    )


def _times(total: OpTotal) -> str:
    return f"{total.count} of each" if total.count != 1 else "once"


def _unknown(old: Plan, new: Plan) -> tuple[Change, ...]:
    a, b = (
        {op for stage in plan.structure.stages for op in stage.replicated_unknown_ops}
        for plan in (old, new)
    )
    runs = "no rule: whole on every device"
    gone = tuple(Change(op, 1, runs, "") for op in sorted(a - b))
    return gone + tuple(Change(op, 1, "", runs) for op in sorted(b - a))
