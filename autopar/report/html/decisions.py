"""Every decision of a plan as a row of a table: parameters by class, ops by class, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir.units import format_bytes, format_ns
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import StagePlan
from autopar.report.names import WHOLE_MODEL, short_op, tensor_name
from autopar.report.placed import choice_text, param_groups, route_text, sharding_text

ROW_KINDS = ("parameter", "op", "route", "saved", "recompute", "offloaded", "output")


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A row: what is decided of what, what that means, and its time, or bytes per device."""

    kind: str
    name: str
    decision: str
    details: str
    figure: str


def decisions(plan: StagePlan) -> tuple[DecisionRow, ...]:
    """The table of a plan: each kind by what it costs."""
    return (*_params(plan), *_ops(plan), *_routes(plan), *_states(plan))


def _params(plan: StagePlan) -> Iterable[DecisionRow]:
    for group in param_groups(plan.structure.params, plan.structure.mesh):
        for_backward = (
            "" if group.for_backward == group.storage else f"; for backward {group.for_backward}"
        )
        shape = f"{group.dtype}[{', '.join(map(str, group.shape))}]"
        details = f"{group.count} of {shape}" if group.count > 1 else shape
        figure = format_bytes(group.local_bytes)
        yield DecisionRow("parameter", group.name, group.stored + for_backward, details, figure)


def _ops(plan: StagePlan) -> Iterable[DecisionRow]:
    totals, mesh = plan.estimates.ops, plan.structure.mesh
    chosen = [(totals.get(key), key, choice) for key, choice in plan.structure.ops.items()]
    for total, key, choice in sorted(chosen, key=lambda each: (-_ns(each[0]), each[1])):
        if total is None:
            yield DecisionRow("op", key, choice, "", "")
            continue
        decision = ", ".join(sharding_text(state, mesh) for _, state in total.outputs)
        decision = decision or choice_text(choice, mesh)
        kinds = ", ".join(kind for kind, _ in total.outputs)
        parts = (
            total.phase,
            "once" if total.count == 1 else f"{total.count} times",
            f"works on {choice_text(choice, mesh)}",
            kinds,
        )
        name = f"{total.module or WHOLE_MODEL}: {short_op(total.op)}"
        details = ", ".join(part for part in parts if part)
        yield DecisionRow("op", name, decision, details, format_ns(_ns(total)))


def _ns(total: OpTotal | None) -> int:
    return total.compute_ns if total else 0


def _routes(plan: StagePlan) -> Iterable[DecisionRow]:
    sends, mesh = plan.estimates.sends, plan.structure.mesh
    taken = [
        (sum(sent.time_ns for sent in sends.get(key, ())), key, steps)
        for key, steps in plan.structure.routes.items()
    ]
    for ns, key, steps in sorted(taken, key=lambda each: (-each[0], each[1])):
        sent = [f"{each.count} {each.kind} on {each.axis}" for each in sends.get(key, ())]
        details = ", ".join([key.rpartition("@")[2], *sent])
        name = tensor_name(plan.estimates, key)
        yield DecisionRow(
            "route", name, route_text(steps, mesh), details, format_ns(ns) if sends else ""
        )


def _states(plan: StagePlan) -> Iterable[DecisionRow]:
    mesh = plan.structure.mesh
    for key, state in sorted(plan.structure.saved.items()):
        yield DecisionRow("saved", key, sharding_text(state, mesh), "saved for backward", "")
    for key in sorted(plan.structure.recompute):
        yield DecisionRow("recompute", key, "", "recomputed in backward instead of saved", "")
    for key in sorted(plan.structure.offloaded):
        yield DecisionRow("offloaded", key, "", "in the host's memory until backward", "")
    for key, state in sorted(plan.structure.outputs.items()):
        yield DecisionRow(
            "output", key, sharding_text(state, mesh), "returned without gradient", ""
        )
