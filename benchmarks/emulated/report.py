"""Tables of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import click

from benchmarks.emulated import scores
from benchmarks.emulated.outcome import Outcome
from benchmarks.emulated.scenarios import SCENARIOS
from benchmarks.tables import markdown, show

HEADER = ("scenario", "way", "predicted ms", "measured ms", "of the fastest")
WIDTH = 110


def report(outcomes: Sequence[Outcome], *, as_markdown: bool, has_choice: bool = True) -> None:
    """Print a table of all ways by scenario; if a plan was chosen freely, one of the scenarios and
    one of the fixed ways."""
    if not outcomes:
        click.echo("nothing was measured")
        return
    every = [row for outcome in outcomes for row in rows(outcome)]
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = [("Every way", HEADER, every)]
    if has_choice:
        tables.append(("The chosen plan", *chosen_table(outcomes)))
        tables.append(("Fixed ways", *rivals_table(outcomes)))
    for title, header, cells in tables:
        if as_markdown:
            click.echo(f"{title}\n\n{markdown(header, cells)}\n")
        else:
            show(title, header, cells, WIDTH)
    correlation = scores.rank_correlation(outcomes)
    click.echo(
        f"Predicted steps: median error {scores.median_error(outcomes):.1%}, "
        f"rank correlation {'none' if correlation is None else f'{correlation:.2f}'}"
    )


def rows(outcome: Outcome) -> list[list[str]]:
    """A scenario's ways, the fastest first."""
    best = scores.fastest(outcome)
    found = [
        [
            outcome.scenario,
            ", = ".join([entry.name, *(a for a, b in outcome.alike.items() if b == entry.name)]),
            "" if entry.predicted_ms is None else f"{entry.predicted_ms:.0f}",
            f"{entry.median_ms:.0f}",
            f"{scores.ratio(entry, best):.2f}",
        ]
        for entry in sorted(outcome.entries, key=lambda entry: entry.median_ms)
    ]
    left = [[outcome.scenario, name, "", "", why] for name, why in outcome.left_out.items()]
    return found + left


def chosen_table(outcomes: Sequence[Outcome]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Per scenario: the cluster, the model, how the choice did, and how the predictions."""
    header = ("scenario", "cluster", "model", "of the fastest", "fastest", "error", "correlation")
    cells: list[list[str]] = []
    for outcome in outcomes:
        scenario = SCENARIOS[outcome.scenario]
        correlation = scores.rank_correlation([outcome])
        cells.append(
            [
                scenario.name,
                scenario.cluster,
                scenario.text,
                f"{scores.behind(outcome):.2f}",
                scores.fastest(outcome).name,
                f"{scores.median_error([outcome]):.0%}",
                "" if correlation is None else f"{correlation:.2f}",
            ]
        )
    return header, cells


def rivals_table(outcomes: Sequence[Outcome]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Per other way: where it could be run, and how much longer it takes than the choice."""
    header = ("way", "scenarios", "of the chosen plan, geometric mean")
    return header, [
        [name, str(count), f"{mean:.2f}"] for name, (count, mean) in scores.rivals(outcomes).items()
    ]
