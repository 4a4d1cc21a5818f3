"""How long the program takes that cuts a chain of segments into stages (`solver.cutting`): CPU
seconds, and by which part of the step other cuts may be better.

    python -m benchmarks.cuts
    python -m benchmarks.cuts --case 126x16 --markdown

`126x16` are 126 equal blocks between the words and the head of a model, in 16 stages; `60x8d` are
60 segments no two of which are equal, in 8. Each segment has four ways, of which each holds less
than the one before, and takes longer; the first stages cannot have the fastest within the memory
there is.
"""

from __future__ import annotations

import random
import time

import click

from autopar.ir.cutting import CutProblem, SegmentPlan
from autopar.solver.cutting import divide
from benchmarks.tables import tell

CASES = ("32x4", "126x16", "126x32", "60x4d", "126x4d", "60x8d", "126x8d", "126x16d")
HEADER = ("segments", "stages", "CPU s", "gap")
TITLE = "CPU seconds of the program that chooses cuts"

POLICIES = 4
BLOCK_NS, BLOCK_BYTES = 10_000_000, 1 << 30


def problem(case: str) -> CutProblem:
    """The segments of a case, one microbatch of each of which takes about ten milliseconds."""
    segments, stages = map(int, case.removesuffix("d").split("x"))
    if case.endswith("d"):
        draw = random.Random(0)
        ways = tuple(_ways(draw.uniform(0.5, 1.5), draw.uniform(0.5, 1.5)) for _ in range(segments))
        counts = (1,) * segments
    else:
        ways = _ways(0.3, 4.0), _ways(1.0, 1.0), _ways(0.8, 4.0)
        counts = (1, segments, 1)
    most = segments / stages * BLOCK_BYTES * (1 + 0.4 * stages)
    return CutProblem(
        counts, ways, tuple(range(stages)), tuple(stages - s for s in range(stages)),
        4 * stages, int(most),
    )  # fmt: skip


def _ways(takes: float, size: float) -> tuple[SegmentPlan, ...]:
    """Four ways of a segment, by what it takes and holds in terms of a block's."""
    return tuple(
        SegmentPlan(
            int(takes * BLOCK_NS * (1 + 0.1 * k)),
            int(size * BLOCK_BYTES),
            int(size * BLOCK_BYTES * (0.6 - 0.15 * k)),
            int(takes * BLOCK_NS / 10),
            int(takes * BLOCK_NS / 3),
        )
        for k in range(POLICIES)
    )


def row(case: str) -> list[str]:
    """A case as cells, in the order of `HEADER`."""
    given = problem(case)
    start_s = time.process_time()
    found = divide(given)
    taken_s = time.process_time() - start_s
    gap = 1 - found.bound_ns / found.least_ns(given)
    segments, stages = case.removesuffix("d").split("x")
    kind = "different" if case.endswith("d") else "equal"
    return [f"{segments} {kind}", stages, f"{taken_s:.2f}", f"{gap:.2%}"]


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, default=CASES, metavar="CASE")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(cases: tuple[str, ...], as_markdown: bool) -> None:
    rows = [row(case) for case in cases]
    tell(TITLE, HEADER, rows, as_markdown=as_markdown)


if __name__ == "__main__":
    main()
