"""Training runs that others published, predicted as they were arranged, beside what was measured:

    python -m benchmarks.published                       # all of them: minutes of one core
    python -m benchmarks.published --rows 10             # ten, spread evenly over the table
    python -m benchmarks.published --only mpt_1b --markdown
    python -m benchmarks.published --picture docs/images/published.svg

`runs` says which runs can be expressed, and how they are read. Beside autopar stands a rival that
gives every run on a device the same FLOP/s, fitted on all runs but that one; where there are many
arrangements of one workload, another that picks by rule of thumb. The picture is without those.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from benchmarks.published.picture import scatter
from benchmarks.published.predict import predict
from benchmarks.published.report import Judged, report
from benchmarks.published.runs import FILES, Run, read, reasons
from benchmarks.published.scores import constant_utilisation


def chosen(runs: tuple[Run, ...], count: int | None, only: str) -> list[Run]:
    """Those that can be expressed and have `only` in their name or source; `count` of them, evenly
    spread over the table."""
    found = [run for run in runs if not reasons(run) and only in f"{run.name} {run.source}"]
    if count is None or count >= len(found):
        return found
    return [found[k * len(found) // count] for k in range(count)]


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(1), help="Only so many runs, evenly spread.")
@click.option("--only", default="", metavar="TEXT", help="Only runs whose name or source has it.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the scatter plot, as SVG.")
def main(rows: int | None, only: str, as_markdown: bool, picture: Path | None) -> None:
    runs = tuple(run for path in FILES for run in read(path))
    found = chosen(runs, rows, only)
    if not found:
        raise click.ClickException(f"no run that can be expressed has {only!r} in name or source")
    console = Console(stderr=True)
    # The rival is fitted on all that can be expressed, whichever are shown.
    fitted = [run for run in runs if not reasons(run)]
    rivals = dict(zip(fitted, constant_utilisation(fitted), strict=True))
    judged = [
        Judged(run, predict(run), rivals[run])
        for run in track(found, "planning", console=console, disable=not console.is_terminal)
    ]
    report(judged, runs, as_markdown=as_markdown)
    if picture is not None:
        shown = [each for each in judged if each.run.workload is None]
        picture.write_text(scatter(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
