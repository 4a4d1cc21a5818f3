"""What the model itself became: parameters, shapes and ops that only one of two plans has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.ir.copies import original_key
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.structure import Param
from autopar.report.changes import Change, ChangeItem, Topic, folded, gathered, single
from autopar.report.names import WHOLE_MODEL, op_place

FINGERPRINT = "fingerprint"


def model_topics(old: Plan, new: Plan) -> tuple[Topic, ...]:
    """Topics whose cause is the model; some may be empty. Of plans in stages, whose ops are not
    those of the model alone, none is on ops but for those without a rule."""
    a, b = old.structure, new.structure
    params, (x, y) = (a.params, b.params), (old.stages[0], new.stages[0])
    staged = not have_ops_of_model(old, new)
    graph = single("class", a.model, b.model)
    graph += single("fingerprint of the graph", a.fingerprint, b.fingerprint)
    return tuple(
        Topic(title, "model", changes)
        for title, changes in (
            (FINGERPRINT, graph),
            ("parameters that are new or gone", folded(_unshared_params(*params))),
            ("parameters of another shape or type", folded(_reshaped(*params))),
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


def _unshared_params(old: Mapping[str, Param], new: Mapping[str, Param]) -> Iterator[ChangeItem]:
    for name in {**old, **new}:
        if name not in new:
            yield ChangeItem("", name, old[name].type_text, "", old[name].num_bytes)
        elif name not in old:
            yield ChangeItem("", name, "", new[name].type_text, new[name].num_bytes)


def _reshaped(old: Mapping[str, Param], new: Mapping[str, Param]) -> Iterator[ChangeItem]:
    for name in old:
        if name in new and old[name].type_text != new[name].type_text:
            weight = max(old[name].num_bytes, new[name].num_bytes)
            yield ChangeItem("", name, old[name].type_text, new[name].type_text, weight)


def _unshared_ops(old: StagePlan, new: StagePlan) -> Iterator[ChangeItem]:
    """Without copies of ops, which are a decision."""
    a, b = old.structure.ops, new.structure.ops
    for key in {**a, **b}:
        if not (key in a and key in b) and original_key(key) == key:
            plan = old if key in a else new
            place, name = op_place(key)
            total = plan.estimates.ops.get(key)
            there = _times(total) if total else "there"
            before, after = (there, "") if key in a else ("", there)
            yield ChangeItem(place, name, before, after, total.compute_ns if total else 0)


def _recounted(old: StagePlan, new: StagePlan) -> tuple[Change, ...]:
    """By the repeated block that ops are in: all of a block's are, where a layer is added."""
    classes: dict[tuple[str, int, int], int] = {}
    for _, a, b in _shared_totals(old, new):
        if a.count != b.count:
            block = a.module.partition("*")[0] + "*" if "*" in a.module else a.module
            place = block or WHOLE_MODEL, a.count, b.count
            classes[place] = classes.get(place, 0) + 1
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
    """Of the ops that both have decisions for."""
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
