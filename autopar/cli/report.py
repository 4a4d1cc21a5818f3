"""`autopar report`: a plan as a page for a browser, and as a trace for a viewer of timelines."""

from __future__ import annotations

import click

from autopar.cli.terminal import debug_option, stage_option, write_page


@click.command()
@click.argument("file")
@click.option("-o", "--output", metavar="PAGE", help="Write a page there, such as plan.html.")
@click.option(
    "--trace",
    "trace_file",
    metavar="TRACE",
    help="Write a trace for ui.perfetto.dev or chrome://tracing there, such as plan.trace.json.",
)
@stage_option
@debug_option
def report(file: str, output: str | None, trace_file: str | None, stage: int | None) -> None:
    """Write the plan in FILE as one HTML page that needs no network, as a timeline of the predicted
    step, or as both. Of a plan in stages, the page has all of them, and a timeline is of one."""
    from autopar.plans.plan import Plan, stage_of

    if output is None and trace_file is None:
        raise click.UsageError("say what to write: -o PAGE, --trace TRACE, or both")
    plan = Plan.load(file)
    stage_plan = (
        stage_of(plan, stage, "a trace") if stage is not None or trace_file is not None else None
    )
    if output is not None:
        from autopar.report.html.page import html

        write_page(output, html(plan, stage))
    if trace_file is not None and stage_plan is not None:
        from autopar.report.trace import chrome_trace

        write_page(trace_file, chrome_trace(stage_plan))
