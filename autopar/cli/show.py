"""`autopar show`: a plan as a page."""

from __future__ import annotations

import click

from autopar.cli.terminal import emit, page_options


@click.command()
@click.argument("file")
@page_options
def show(file: str, as_json: bool, width: int | None, no_color: bool, debug: bool) -> None:
    """Print what the plan in FILE decided, and what a step is predicted to cost."""
    from autopar.plans.plan import Plan
    from autopar.report.summary import Summary, summarize

    emit(summarize(Plan.load(file)), Summary.page, as_json, width, no_color)
