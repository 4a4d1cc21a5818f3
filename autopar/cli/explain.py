"""`autopar explain`: the reasons of a plan, and its alternatives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.plan_flags import PlanFlags
from autopar.cli.terminal import (
    Output,
    batch_option,
    build_target,
    page_options,
    print_content,
    spoken_progress,
    stage_option,
)

if TYPE_CHECKING:
    from autopar.plans.plan import Plan
    from autopar.plans.requests.plan_options import ConstraintOptions
    from autopar.report.reasons import Reasons

_TARGET = re.compile(r"[^:]+:[A-Za-z_][\w.]*")


@click.command(cls=PlanFlags, groups=["constraints"])
@click.argument("file")
@click.argument("name", required=False)
@click.argument("target", required=False)
@batch_option
@click.option("--cluster", metavar="CLUSTER", help="The plan's cluster, if no preset has its name.")
@click.option("--profile", "profile_file", metavar="FILE", help="The profile it was priced with.")
@stage_option
@page_options
def explain(
    file: str,
    name: str | None,
    target: str | None,
    global_batch: int | None,
    cluster: str | None,
    profile_file: str | None,
    stage: int | None,
    options: dict[str, Any],
    how: Output,
) -> None:
    """Explain the plan in FILE: all of it, or NAME.

    NAME is a parameter (model.layers.*.mlp.down_proj.weight, or that of one layer), a module, or
    the key of an op. The page says what was chosen, what it costs, part by part, and which limit
    binds. For a plan in stages it says where the model is cut and why, what waiting costs, and what
    is held in flight.

    TARGET is the function that the model was planned from (train.py:build). With it, the plan's
    problem is solved anew. The page then has the step with each alternative, everything else
    adapted, and what more memory or faster links would save. Constraints replace those that the
    plan records.
    """
    from autopar.plans.plan import Plan
    from autopar.report.explained import explained
    from autopar.report.reasons import knows

    plan = Plan.load(file)
    is_target = target is None and _TARGET.fullmatch(name or "") is not None
    if is_target and not any(knows(each, name or "") for each in plan.stages):
        name, target = None, name
    reasons = explained(plan, name or "", stage)
    if target is not None:
        from autopar.plans.requests.plan_options import ConstraintOptions

        given = ConstraintOptions(**options["constraints"])
        imposed = None if given.is_empty else given
        reasons = _alternatives(
            plan, name or "", target, global_batch, cluster, profile_file, imposed, stage
        )
    print_content(reasons, reasons.page, how)


def _alternatives(
    plan: Plan,
    name: str,
    target: str,
    global_batch: int | None,
    cluster: str | None,
    profile_file: str | None,
    imposed: ConstraintOptions | None,
    stage: int | None,
) -> Reasons:
    from autopar.plans.recorded import cluster_of, options_of

    # A missing cluster or option is an error before torch is imported.
    if cluster is None:
        cluster_of(plan)
    options_of(plan, imposed)
    with spoken_progress() as progress:
        built = build_target(target, global_batch, progress)
        from autopar.driver.explain.alternatives import explain_plan

        return explain_plan(
            plan,
            name,
            built,
            cluster=cluster,
            profile=profile_file,
            imposed=imposed,
            stage=stage,
            progress=progress,
        )
