"""What a stored plan could be otherwise: its problem stated anew from the model, and solved with
one thing changed.

The caller passes what a plan does not hold: the model, and the cluster if no preset has its name.
The rest is compared: the model must be the one that was planned, and the new step is compared with
the plan's.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import partial

from autopar.cluster.profile import Profile
from autopar.compile import plan_call
from autopar.driver.explain.what_if import GIB, Explainer, make_explainer
from autopar.driver.planning import (
    call_on,
    checked_plan,
    describe_cluster,
    make_call_request,
    planned_gradients,
)
from autopar.errors import OtherStepWarning
from autopar.ir.mesh import Cluster
from autopar.ir.patterns import expand
from autopar.ir.units import format_ns
from autopar.plans.explanation import Benefit, Explanation
from autopar.plans.plan import Plan
from autopar.plans.recorded import cluster_of, options_of
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import ConstraintOptions
from autopar.report.explained import stage_having
from autopar.report.reasons import Reasons, reasons
from autopar.runtime.module.building import Built
from autopar.solver.search import Progress, silent

MAX_SUBJECTS = 4
"""How many tensors of one name are looked at, where their decisions differ."""


def explain_plan(
    plan: Plan,
    name: str,
    built: Built,
    *,
    cluster: Cluster | str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    imposed: ConstraintOptions | None = None,
    stage: int | None = None,
    progress: Progress | None = None,
) -> Reasons:
    """`report.reasons.reasons` of `name`, with its alternatives and benefits. An alternative has
    the step that results if all else adapts. Benefits say what 1 GiB more memory, or twice the
    bandwidth of each mesh axis, would save.

    `built` is the model that was planned, and its inputs. In a plan with stages, `stage` is the one
    whose decisions are explained, by default the one that has the name. The other stages stay as
    they are, and the step is simulated anew.

    PlanError if several stages have the name and none is given. PlanMismatchError if it is for
    another model. ClusterError or ConstraintError if the cluster, or what was imposed, must be
    given. An `OtherStepWarning` says what differs where the problem as it is stated now has
    another best step than the plan.
    """
    say = progress or silent
    has_name = stage_having(plan, name, stage)
    plan_reasons = reasons(has_name, name)
    described = describe_cluster(cluster_of(plan) if cluster is None else cluster, profile)
    options = options_of(plan, imposed)
    explainer = _explainer(plan, built, described, options, say, has_name.number)
    alternatives: list[Explanation] = []
    for each in _subjects(plan_reasons, name):
        say(f"looking at the alternatives of {each}")
        alternatives.append(explainer.alternatives(each))
    return replace(
        plan_reasons, alternatives=tuple(alternatives), benefits=_benefits(explainer, say)
    )


def _subjects(reasons: Reasons, name: str) -> tuple[str, ...]:
    """The names to call `Explainer.alternatives` with; one of several identical parameters."""
    if reasons.kind == "module":
        return (name,)
    names = [decision.name for decision in reasons.decisions[:MAX_SUBJECTS]]
    return tuple(expand(each.partition(", ")[0])[0] if "{" in each else each for each in names)


def _explainer(
    plan: Plan, built: Built, cluster: Cluster, options: Options, progress: Progress, stage: int
) -> Explainer:
    progress("tracing the model")
    call = call_on(built.model, built.inputs, options, planned_gradients(plan.structure))
    traced, _ = plan_call(call, partial(checked_plan, plan))
    progress("solving the plan's problem again")
    explainer = make_explainer(make_call_request(call, traced, cluster), stage)
    _compare(plan, explainer, cluster)
    return explainer


def _benefits(explainer: Explainer, progress: Progress) -> tuple[Benefit, ...]:
    progress("looking at what more memory would buy")
    benefits = [explainer.more_memory(GIB)]
    if len(explainer.place.step.stages) > 1:
        for link in dict.fromkeys(level.link.name for level in explainer.cluster.levels):
            progress(f"looking at what a faster {link} would buy")
            benefits.append(explainer.faster_link(link))
        return tuple(benefits)
    for axis in explainer.best.mesh.names:
        progress(f"looking at what a faster link of {axis} would buy")
        benefits.append(explainer.faster_axis(axis))
    return tuple(benefits)


def _compare(plan: Plan, explainer: Explainer, cluster: Cluster) -> None:
    step = explainer.place.step
    now, then = explainer.best.estimates, plan.stages[0].estimates
    now_ns, then_ns = (
        [stage.modelled_ns for stage in each.stages] for each in (step.estimates, plan.estimates)
    )
    if now_ns == then_ns:
        return
    differing = [
        f"{what} {old} in the plan, {new} now"
        for what, old, new in (
            ("cluster", plan.structure.cluster, cluster.name),
            ("rates", then.cluster, now.cluster),
        )
        if old != new
    ]
    reason = "; ".join(differing) or (
        "the cluster is the same: the plan was not solved to the end, imposed on otherwise, or "
        "made by another version of autopar"
    )
    warnings.warn(
        OtherStepWarning(
            f"as modelled, the best plan takes {format_ns(sum(now_ns))} as it is priced now, and "
            f"the stored one {format_ns(sum(then_ns))}: what follows is about "
            f"the former ({reason})"
        ),
        stacklevel=3,
    )
