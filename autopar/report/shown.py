"""The page of a plan, or of one of its stages."""

from __future__ import annotations

from rich.console import RenderableType

from autopar.errors import PlanError
from autopar.plans.plan import Plan, StagePlan
from autopar.report.printed import Printed
from autopar.report.summary import Summary, summarize


def shown(plan: Plan, stage: int | None = None) -> Summary:
    """What a person wants to know of a plan, with all of a stage if one is chosen. PlanError if
    there is no such stage."""
    if stage is not None:
        stage_of(plan, stage)
    return summarize(plan, stage)


def page_of(content: Printed) -> RenderableType:
    """What is printed of it."""
    return content.page()


def stage_of(plan: Plan, stage: int | None, what: str = "") -> StagePlan:
    """A stage of a plan; without a number, the only one. PlanError, saying what there is, if there
    are several, and `what` it is that has to be of one."""
    count = len(plan.stages)
    if stage is None and count > 1:
        why = f"{what} is of one stage, and " if what else ""
        last = count - 1
        raise PlanError(f"{why}the plan has {count} stages: say which (--stage 0 to {last})")
    if stage is not None and stage >= count:
        there = f"{count} stages, 0 to {count - 1}" if count > 1 else "one stage, 0"
        raise PlanError(f"there is no stage {stage}: the plan has {there}")
    return plan.stages[stage or 0]
