"""`autopar show`: a plan as a page."""

from __future__ import annotations

import click

from autopar.cli.terminal import Output, page_options, print_content


@click.command()
@click.argument("file")
@page_options
def show(file: str, how: Output) -> None:
    """Print what the plan in FILE decided, and what a step is predicted to cost."""
    from autopar.plans.plan import Plan
    from autopar.report.summary import Summary, summarize

    print_content(summarize(Plan.load(file)), Summary.page, how)
