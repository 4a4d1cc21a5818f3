"""What the methods of plans and frontiers return. Plans and frontiers are nouns in a low room, and
their pages are made in higher ones. Their methods therefore import this module when they are
called, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.report.difference import compare
from autopar.report.explained import explained
from autopar.report.frontier import FrontierSummary, summarize_frontier
from autopar.report.reasons import Reasons
from autopar.report.summary import Summary, summarize
from autopar.report.verdict import Verdict, judge, parse_bounds

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

__all__ = [
    "FrontierSummary",
    "Reasons",
    "Summary",
    "Verdict",
    "explain",
    "judged",
    "summarize",
    "summarize_frontier",
]


def explain(
    plan: Plan,
    name: str,
    model: Any,
    inputs: Any,
    *,
    stage: int | None,
    **how: Any,
) -> Reasons:
    """`display.Shown.explain`."""
    if model is None:
        return explained(plan, name, stage)
    from autopar.driver.explain.alternatives import explain_plan
    from autopar.runtime.module.building import Built

    return explain_plan(plan, name, Built(model, inputs), stage=stage, **how)


def judged(old: Plan, new: Plan, fail_over: str) -> Verdict:
    """`display.Shown.diff`."""
    return judge(compare(old, new), parse_bounds(fail_over) if fail_over else None)
