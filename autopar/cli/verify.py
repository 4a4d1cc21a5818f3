"""`autopar verify`: a plan, simulated and compared with the unchanged model."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from autopar.cli.plan_flags import PlanFlags
from autopar.cli.terminal import (
    Output,
    build_target,
    page_options,
    print_content,
    spoken_progress,
    target_options,
)


@click.command(cls=PlanFlags, groups=["outputs"])
@click.argument("file")
@target_options
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "own"]),
    default="own",
    show_default=True,
    help="Cast the model first; float64 leaves least room for rounding.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and inputs.")
@page_options
def verify(
    file: str,
    target: str,
    global_batch: int | None,
    dtype: str,
    seed: int,
    options: dict[str, Any],
    how: Output,
) -> None:
    """Simulate all ranks of the plan in FILE in this process, and compare with the model of TARGET.

    The loss and every gradient must be those of the unchanged model, else the status is 4. Options
    of outputs replace those that the plan records.
    """
    from autopar.plans.plan import Plan

    loaded = Plan.load(file)
    with spoken_progress() as progress:
        built = build_target(target, global_batch, progress, on_meta=False, seed=seed)
        from autopar.driver.verify import compare_with_eager
        from autopar.plans.requests.plan_options import OutputOptions

        given = OutputOptions(**options["outputs"])
        report = compare_with_eager(
            loaded,
            built.model,
            built.inputs,
            dtype=None if dtype == "own" else dtype,
            seed=seed,
            outputs=None if given == OutputOptions() else given,
            progress=progress,
        )

    from autopar.report.verification import page

    print_content(report, partial(page, report), how)
    report.check()
