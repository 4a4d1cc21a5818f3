"""Explanations as plain text. All steps are as modelled (`Estimates.modelled_ns`)."""

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
    now_ns = explanation.modelled_ns
    rows = [
        (sharding_text(found.sharding, mesh), *_figures(found, now_ns))
        for found in explanation.alternatives
    ]
    head = f"{explanation.subject}: {format_ns(now_ns)} as modelled"
    return "\n".join((head, *columns(rows))) + "\n"


def benefits_text(benefits: Sequence[Benefit]) -> str:
    """The step before and after each change; the estimate is that of `Benefit`."""
    rows = [
        (
            each.change,
            format_ns(each.modelled_ns),
            _more(each.modelled_ns - each.before_ns, each.before_ns),
            "" if each.estimate_ns is None else f"estimate {format_ns(each.estimate_ns)}",
        )
        for each in benefits
    ]
    head = f"now: {format_ns(benefits[0].before_ns)} as modelled"
    return "\n".join((head, *columns(rows))) + "\n"


def _figures(found: Alternative, now_ns: int) -> Row:
    if found.is_chosen:
        return format_ns(now_ns), "chosen"
    if found.status is Status.INFEASIBLE:
        return "", "does not fit in memory"
    bound = f"at least {_more(found.bound_ns - now_ns, now_ns)}"
    if found.modelled_ns is None:
        return format_ns(found.bound_ns), bound
    more = _more(found.modelled_ns - now_ns, now_ns)
    if found.status is Status.OPTIMAL:
        return format_ns(found.modelled_ns), more
    return format_ns(found.modelled_ns), f"{more}, {bound}"


def _more(ns: int, of_ns: int) -> str:
    """`+1.5 ms (+2 %)`"""
    if ns == 0:
        return "the same"
    sign = "+" if ns > 0 else "-"
    return f"{sign}{format_ns(abs(ns))} ({sign}{format_share(abs(ns), of_ns)})"
