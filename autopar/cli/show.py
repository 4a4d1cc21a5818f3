"""`autopar show`: a plan as a page."""

from __future__ import annotations

import click

from autopar.cli.terminal import Output, page_options, print_content, stage_option


@click.command()
@click.argument("file")
@stage_option
@page_options
def show(file: str, stage: int | None, how: Output) -> None:
    """Print the decisions of the plan in FILE, and the predicted cost of a step."""
    from autopar.plans.plan import Plan
    from autopar.report.summary import summarize

    summary = summarize(Plan.load(file), stage)
    print_content(summary, summary.page, how)
