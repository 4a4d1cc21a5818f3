"""How `autopar solve` does on instances of the ASPLOS/EuroSys 2025 contest (intra-op parallelism).

The instances are not part of this repository. They are in google/iopddl on GitHub (Apache-2.0):

    python -m benchmarks.contest PATH/asplos-2025-iopddl-*.json.gz
    python -m benchmarks.contest PATH --case B --case G --markdown

Each one is solved by the command, in a process of its own, within the contest's time limit, reading
included; what it prints is added up again here from the file. What it had at a quarter and at half
of the time is from its log.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.tables import markdown, show

ROOT = Path(__file__).resolve().parents[1]
HEADER = (
    "instance", "limit s", "cost", "best known", "ratio", "at 1/4", "at 1/2", "bound", "gap",
    "wall s", "CPU s", "peak GiB", "first place", "XLA",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What is known of an instance: the contest's limit in seconds, the lowest cost that was
    published, that of the contest's first place (None: unknown), and that of XLA's own solver
    (None: it has no solution, or it is unknown)."""

    limit_s: int
    best: int
    first_place: int | None
    xla: int | None


KNOWN = {
    "A": Known(60, 6_548_641_531, 6_569_457_676, 13_214_846_074),
    "B": Known(60, 532_843, 532_843, 990_205),
    "G": Known(120, 217_039, 217_039, 1_264_777),
    "K": Known(180, 2_242_600_000, 2_274_276_676, None),
    "M": Known(180, 49_928_460_991, 49_928_460_991, None),
    "R": Known(240, 351_830_000_000, None, None),
    "S": Known(240, 1_522_000_000, 1_534_613_444, 1_995_944_800_323),
}


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--case", "cases", multiple=True, type=click.Choice(sorted(KNOWN)))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(paths: tuple[Path, ...], cases: tuple[str, ...], as_markdown: bool) -> None:
    files = [
        file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])
    ]
    found = {match[1]: file for file in files if (match := re.search(r"-([A-Z])\.json", file.name))}
    wanted = [case for case in sorted(KNOWN) if case in (cases or KNOWN) and case in found]
    if not wanted:
        raise click.ClickException("none of the contest's instances is there")
    rows = [measure(case, found[case]) for case in wanted]
    if as_markdown:
        click.echo(markdown(HEADER, rows))
    else:
        show("autopar solve, contest's time limits", HEADER, rows, 160)


def measure(case: str, file: Path, limit_s: float | None = None) -> tuple[str, ...]:
    """The row of one instance. RuntimeError: no answer, or one that is not what it says."""
    known = KNOWN[case]
    limit_s = limit_s or known.limit_s
    command = [
        sys.executable,
        "-m",
        "autopar.cli.main",
        "solve",
        str(file),
        "--time-limit",
        str(limit_s),
        "--log",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
    )  # fmt: skip
    wall_s = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{file.name}: {done.stderr.strip()}")
    *above, last = done.stdout.splitlines()
    said = {line.split()[0]: line.split()[1] for line in above}
    cost = cost_of(file, json.loads(last))
    if cost != int(said["cost"]):
        raise RuntimeError(f"{file.name}: the cost is {cost}, and {said['cost']} was printed")
    bound = int(said["bound"])
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (
        case,
        f"{limit_s:g}",
        f"{cost:,}",
        f"{known.best:,}",
        f"{cost / known.best:.4f}",
        *(early(done.stderr, part * limit_s) for part in (1 / 4, 1 / 2)),
        f"{bound:,}",
        f"{100 * (cost - bound) / cost:.2f} %",
        f"{wall_s:.0f}",
        f"{cpu_s:.0f}",
        f"{after.ru_maxrss / 2**20:.1f}",
        f"{known.first_place / known.best:.4f}" if known.first_place else "unknown",
        f"{known.xla / known.best:.2f}" if known.xla else "none",
    )


def early(log: str, seconds: float) -> str:
    """The cost of the plan that `autopar solve` had after `seconds`, as a part of the last one."""
    rounds = re.findall(r"^ *([\d.]+) s  round \d+: plan (\d+),", log, re.MULTILINE)
    costs = [int(cost) for at, cost in rounds if float(at) <= seconds]
    return f"{costs[-1] / int(rounds[-1][1]):.4f}" if costs else "no plan"


def cost_of(file: Path, choice: Sequence[int]) -> int:
    """The cost of a solution by the contest's rules. RuntimeError: it breaks the limit."""
    packed = file.read_bytes()
    stated = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)["problem"]
    nodes, edges = stated["nodes"], stated["edges"]
    total = sum(costs[c] for costs, c in zip(nodes["costs"], choice, strict=True))
    for (a, b), costs in zip(edges["nodes"], edges["costs"], strict=True):
        total += costs[choice[a] * len(nodes["costs"][b]) + choice[b]]
    changes: dict[int, int] = {}
    for (start, stop), usages, c in zip(nodes["intervals"], nodes["usages"], choice, strict=True):
        if start < stop:
            changes[start] = changes.get(start, 0) + usages[c]
            changes[stop] = changes.get(stop, 0) - usages[c]
    in_use = 0
    for at in sorted(changes):
        in_use += changes[at]
        if "usage_limit" in stated and in_use > stated["usage_limit"]:
            raise RuntimeError(f"{file.name}: {in_use} is in use at time {at}")
    return total


if __name__ == "__main__":
    main()
