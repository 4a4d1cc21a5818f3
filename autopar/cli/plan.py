"""`autopar plan`: a model and a cluster in, a plan out."""

from __future__ import annotations

from typing import Any

import click

from autopar.cli.plan_flags import PlanFlags
from autopar.cli.terminal import (
    CTRL_C,
    Output,
    build_target,
    page_options,
    print_content,
    spoken_progress,
    target_options,
    write_page,
)
from autopar.ir.gc_pause import collection_paused


@click.command(cls=PlanFlags)
@target_options
@click.option(
    "--cluster",
    metavar="CLUSTER",
    help="64x8xH100, a .toml file or a profile; default: the devices at hand.",
)
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    help="Price with what `autopar profile` measured, not with datasheets.",
)
@click.option(
    "--frontier",
    "limits",
    is_flag=False,
    flag_value="",
    metavar="[LIMITS]",
    help="The step against memory: the best plan within each of LIMITS, as in 80,40,24GiB; "
    "default: some eight, down to the smallest-memory plan.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write the plan there, with --frontier a page for a browser; /dev/stdout: instead of the "
    "page.",
)
@page_options
@collection_paused()
def plan(
    target: str,
    cluster: str | None,
    global_batch: int | None,
    profile_file: str | None,
    limits: str | None,
    output: str | None,
    options: dict[str, Any],
    how: Output,
) -> None:
    """Plan the model of TARGET, such as train.py:build, for a cluster.

    TARGET names a function that returns (model, inputs). It runs on torch's meta device: neither
    memory for the weights nor a GPU is needed.
    """
    from autopar.cluster.parsing import parse_cluster
    from autopar.cluster.profile import Profile
    from autopar.plans.requests.read_options import make_options

    make_options(**options)
    options["cluster"] = None if cluster is None else parse_cluster(cluster)
    options["profile"] = None if profile_file is None else Profile.load(profile_file)
    search = options["search"]
    if limits is not None:
        _frontier(target, global_batch, limits, output, how, options)
        return
    from autopar.ir.files import is_standard_output
    from autopar.report.summary import summarize

    with spoken_progress() as progress:
        built = build_target(target, global_batch, progress)
        from autopar.driver.api import plan as make_plan

        if search["margin"] is None:
            search["margin"] = output is not None
        new_plan = make_plan(built.model, built.inputs, progress=progress, **options)
    if output is not None:
        new_plan.save(output)
    if output is None or not is_standard_output(output):
        summary = summarize(new_plan)
        print_content(summary, summary.page, how)
    if new_plan.provenance.is_interrupted:
        raise click.exceptions.Exit(CTRL_C)


def _frontier(
    target: str,
    global_batch: int | None,
    limits: str,
    output: str | None,
    how: Output,
    options: dict[str, Any],
) -> None:
    """Print, and write as a page, the best steps within several memory limits."""
    from autopar.ir.files import is_standard_output
    from autopar.plans.frontier import read_limits

    read_limits(limits)
    with spoken_progress() as progress:
        built = build_target(target, global_batch, progress)
        from autopar.driver.api import frontier

        points = frontier(built.model, built.inputs, limits=limits, progress=progress, **options)
        summary = points.summary()
    if output is not None:
        from autopar.report.html.frontier import frontier_html

        write_page(output, frontier_html(summary))
        if is_standard_output(output):
            return
    print_content(summary, summary.page, how)
