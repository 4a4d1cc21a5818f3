"""`autopar check`: golden plans, planned anew and compared."""

from __future__ import annotations

import os
import warnings
from itertools import count

import click

from autopar.cli.terminal import (
    Output,
    comparison_options,
    page_options,
    print_content,
    spoken_progress,
)


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option("--update", is_flag=True, help="Write plans that differ or are missing.")
@click.option("--allow-gap", is_flag=True, help="Write plans that are not proven optimal, too.")
@click.option("--no-cache", is_flag=True, help="Solve anew what was solved before.")
@click.option(
    "-j",
    "num_processes",
    type=click.IntRange(1),
    metavar="N",
    help="Plans at a time; default: one per core.",
)
@comparison_options
@page_options
def check(
    folders: tuple[str, ...],
    update: bool,
    allow_gap: bool,
    no_cache: bool,
    num_processes: int | None,
    fail_over: str | None,
    form: str,
    how: Output,
) -> int:
    """Plan anew what each NAME.toml in FOLDER describes, and compare with NAME.plan.json.

    The exit status is 0 if all plans are the same, 2 if any differs or is missing, 1 if any cannot
    be made. What counts is as in `autopar diff`.
    """
    from autopar.driver.gate.golden import Check, find_recipes, run_all
    from autopar.driver.gate.plan_cache import default_folder
    from autopar.errors import AutoparWarning
    from autopar.report.checks import CheckOutcome, checks, checks_markdown
    from autopar.report.verdict import parse_bounds

    options = Check(
        update=update,
        allow_gap=allow_gap,
        bounds=None if fail_over is None else parse_bounds(fail_over),
        cache=None if no_cache else default_folder(),
        num_processes=num_processes or len(os.sched_getaffinity(0)),
    )
    paths = find_recipes(folders)
    done = count(1)
    with spoken_progress() as progress:
        progress(f"planning {len(paths)} plans again")

        def on_outcome(outcome: CheckOutcome) -> None:
            progress(f"{next(done)} of {len(paths)} planned again; {outcome.name} {outcome.status}")

        outcomes = run_all(paths, options, on_outcome)
    for outcome in outcomes:
        for line in outcome.warnings:
            warnings.warn(AutoparWarning(f"{outcome.name}: {line}"), stacklevel=2)
    content = checks(outcomes)
    if form == "md":
        click.echo(checks_markdown(content), nl=False)
    else:
        print_content(content, content.page, how)
    return content.status
