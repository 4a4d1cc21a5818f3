"""How planning grows with depth: Llama-8B of 32 and of 80 layers on 8x8 H100. CPU seconds and their
shares by phase, memory, and what each is of the first depth's.

    python -m benchmarks.depth
    python -m benchmarks.depth --layers 3 --layers 32 --case 8x8 --markdown
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from benchmarks.plan_time import PHASES, Result, in_own_process
from benchmarks.tables import tell

HEADER = ("", *PHASES, "total", "price + solve", "peak", "nodes", "proof")
TITLE = "CPU seconds by phase, and their shares; peak memory of the process in GiB"


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Per depth its seconds and their shares, and from the second on ratios to the first."""
    found: list[list[str]] = []
    first = results[0]
    for result in results:
        total_s = _total_s(result)
        seconds = [result.cpu_s[phase] for phase in PHASES]
        found.append(
            [
                f"{result.layers} layers" + ("*" if result.note else ""),
                *(f"{each_s:.2f}" for each_s in seconds),
                f"{total_s:.2f}",
                f"{_solving_s(result):.2f}",
                f"{result.peak_bytes / 2**30:.2f}",
                f"{result.graph_nodes:,}",
                result.status,
            ]
        )
        found.append(["share", *(f"{each_s / total_s:.0%}" for each_s in seconds), *[""] * 5])
        if result is not first:
            found.append(
                [
                    f"of {first.layers} layers",
                    *(
                        f"{_ratio(each_s, first.cpu_s[phase])}"
                        for each_s, phase in zip(seconds, PHASES, strict=True)
                    ),
                    _ratio(total_s, _total_s(first)),
                    _ratio(_solving_s(result), _solving_s(first)),
                    _ratio(result.peak_bytes, first.peak_bytes),
                    _ratio(result.graph_nodes, first.graph_nodes),
                    "",
                ]
            )
    return found


def _total_s(result: Result) -> float:
    return sum(result.cpu_s.values())


def _solving_s(result: Result) -> float:
    return result.cpu_s["price"] + result.cpu_s["solve"]


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else ""


@click.command(help=__doc__)
@click.option("--case", default="8x8", show_default=True, metavar="8x8", help="H100s.")
@click.option(
    "--layers", multiple=True, type=click.IntRange(1), default=(32, 80), show_default=True
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(case: str, layers: tuple[int, ...], as_markdown: bool) -> None:
    found = [in_own_process(case, depth) for depth in layers]
    results = [result for result in found if result is not None]
    if results:
        title = f"Llama-8B on {case} H100. {TITLE}"
        tell(title, HEADER, rows(results), as_markdown=as_markdown)
        for result in results:
            if result.note:
                click.echo(f"\n* {result.layers} layers: {result.note}")
    sys.exit(len(results) < len(layers))


if __name__ == "__main__":
    main()
