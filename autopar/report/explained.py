"""The explanation of a plan, or of a name in it."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.plans.plan import Plan, StagePlan, stage_of
from autopar.report.names import stages_text
from autopar.report.reasons import Reasons, knows, reasons, whole_reasons


def explained(plan: Plan, name: str = "", stage: int | None = None) -> Reasons:
    """`reasons.reasons` of `name`, in the stage that has it; of all stages together if there is
    neither name nor stage. PlanError if several stages have it, or there is no such stage;
    AutoparError, with what comes close, if nothing has the name."""
    if stage is None and not name:
        return whole_reasons(plan)
    content = reasons(stage_having(plan, name, stage), name)
    return content if name else replace(content, subject=f"stage {stage}")


def stage_having(plan: Plan, name: str, stage: int | None = None) -> StagePlan:
    """The stage that has `name`: stage `stage` if that is given, or the only one that has it; the
    first if none has. PlanError if several have it."""
    if stage is not None:
        return stage_of(plan, stage)
    having = [k for k, each in enumerate(plan.stages) if knows(each, name)]
    if len(having) > 1 and name:
        raise PlanError(f"{name} is in {stages_text(having)}: say which (--stage {having[0]})")
    return plan.stages[having[0] if having else 0]
