"""The page of a plan: that of a pipeline, or of one stage that does all."""

from __future__ import annotations

from rich.console import RenderableType

from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.report.pipeline import PipelineSummary, summarize_pipeline
from autopar.report.printed import Printed
from autopar.report.summary import Summary, summarize


def shown(plan: Plan) -> Summary | PipelineSummary:
    """What a person wants to know of a plan."""
    return summarize_pipeline(plan) if plan.structure.stages else summarize(plan)


def page_of(content: Printed) -> RenderableType:
    """What is printed of it."""
    return content.page()


def stage_of(plan: Plan, stage: int | None, what: str = "") -> Plan:
    """A stage of a pipeline as a plan of its own; without a number, a plan that is no pipeline.
    PlanError, saying what there is, otherwise, and `what` it is that has to be of one stage."""
    count = len(plan.structure.stages)
    if stage is None and not count:
        return plan
    if stage is None:
        why = f"{what} is of one stage, and " if what else ""
        last = count - 1
        raise PlanError(f"{why}the plan has {count} stages: say which (--stage 0 to {last})")
    if stage >= count:
        what = f"{count} stages, 0 to {count - 1}" if count else "no stages"
        raise PlanError(f"there is no stage {stage}: the plan has {what}")
    return plan.stages[stage]
