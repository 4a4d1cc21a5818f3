"""Explanations as plain text. All steps are with nothing hidden, as the solver compares plans."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.problem import Status
from autopar.ir.units import format_ns, format_share
from autopar.plans.explanation import Alternative, Benefit, Explanation
from autopar.report.placed import sharding_text
from autopar.report.printed import Row, columns


def alternatives_text(explanation: Explanation) -> str:
    """The step with each alternative of a tensor, beside what the plan takes."""
    mesh = explanation.mesh
    step_ns = explanation.step_ns
    rows = [
        (sharding_text(found.sharding, mesh), *_figures(found, step_ns))
        for found in explanation.alternatives
    ]
    head = f"{explanation.subject}: {format_ns(step_ns)} with nothing hidden"
    return "\n".join((head, *columns(rows))) + "\n"


def benefits_text(benefits: Sequence[Benefit]) -> str:
    """The step before and after each change; the estimate is that of `Benefit`."""
    rows = [
        (
            each.change,
            format_ns(each.step_ns),
            _more(each.step_ns - each.before_ns, each.before_ns),
            "" if each.estimate_ns is None else f"estimate {format_ns(each.estimate_ns)}",
        )
        for each in benefits
    ]
    head = f"now: {format_ns(benefits[0].before_ns)} with nothing hidden"
    return "\n".join((head, *columns(rows))) + "\n"


def _figures(found: Alternative, step_ns: int) -> Row:
    if found.is_chosen:
        return format_ns(step_ns), "chosen"
    if found.status is Status.INFEASIBLE:
        return "", "does not fit in memory"
    if found.step_ns is None:
        more = _more(found.bound_ns - step_ns, step_ns)
        return format_ns(found.bound_ns), f"at least {more}"
    more = _more(found.step_ns - step_ns, step_ns)
    if found.status is Status.OPTIMAL:
        return format_ns(found.step_ns), more
    return format_ns(found.step_ns), f"{more}, at least {_more(found.bound_ns - step_ns, step_ns)}"


def _more(ns: int, of_ns: int) -> str:
    """`+1.5 ms (+2 %)`"""
    if ns == 0:
        return "the same"
    sign = "+" if ns > 0 else "-"
    return f"{sign}{format_ns(abs(ns))} ({sign}{format_share(abs(ns), of_ns)})"
