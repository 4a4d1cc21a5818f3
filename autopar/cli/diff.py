"""`autopar diff`: what is different between two plans."""

from __future__ import annotations

import click

from autopar.cli.terminal import Output, comparison_options, page_options, print_content


@click.command()
@click.argument("old")
@click.argument("new")
@comparison_options
@page_options
def diff(
    old: str,
    new: str,
    fail_over: str | None,
    form: str,
    how: Output,
) -> int:
    """Print the differences of the plan in NEW to that in OLD.

    The exit status is 0 if they are the same and 2 if not. All decisions count, and estimates that
    moved by more than 1 %; with --fail-over, only what it names.
    """
    from autopar.plans.plan import Plan
    from autopar.report.difference import compare
    from autopar.report.verdict import judge, markdown, parse_bounds

    bounds = None if fail_over is None else parse_bounds(fail_over)
    verdict = judge(compare(Plan.load(old), Plan.load(new)), bounds)
    if form == "md":
        click.echo(markdown(verdict, verdict.difference.new.model), nl=False)
    else:
        print_content(verdict, verdict.page, how)
    return verdict.status
