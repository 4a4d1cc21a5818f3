"""How long the commands that read stored plans take, and what they write: Llama-8B's widths on 8x8
H100, of as many layers as asked for.

    python -m benchmarks.commands                   # 2, 80 and 126 layers
    python -m benchmarks.commands --layers 32 --repeats 9 --markdown

Each command is a process of its own, Python's start included: the median and the largest of the
repeats, wall time and CPU.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.tables import markdown, show

HEADER = ("", "median", "most", "CPU", "bytes out")
PARAM = "model.layers.*.mlp.down_proj.weight"
MESH, BATCH, SEQUENCE = "8x8", 64, 2048


def store(layers: int, path: Path) -> None:
    import torch

    import autopar
    from benchmarks.models import llama_8b

    with torch.device("meta"):
        model = llama_8b(layers)
        ids = torch.zeros((BATCH, SEQUENCE), dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    autopar.plan(model, inputs, cluster=f"{MESH}xH100", mesh=MESH).save(path)


def timed(arguments: Sequence[str], repeats: int) -> tuple[list[float], float, int]:
    """Wall seconds of each run, the median of their CPU seconds, and bytes on standard output."""
    walls: list[float] = []
    used: list[float] = []
    written = 0
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "autopar.cli.main", *arguments], capture_output=True, check=False
        )
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode not in (0, 2):
            raise click.ClickException(done.stderr.decode())
        written = len(done.stdout)
    return walls, statistics.median(used), written


def rows(layers: int, folder: Path, repeats: int) -> list[list[str]]:
    plan, other = folder / f"{layers}.json", folder / f"{layers}-other.json"
    page, trace = folder / f"{layers}.html", folder / f"{layers}.trace.json"
    store(layers, plan)
    other.write_bytes(plan.read_bytes().replace(b'"optimizer": "adamw"', b'"optimizer": "sgd"'))
    commands = {
        "show": ["show", str(plan)],
        "diff": ["diff", str(plan), str(other)],
        "explain": ["explain", str(plan), PARAM],
        "report": ["report", str(plan), "-o", str(page), "--trace", str(trace)],
    }
    found = [[f"{layers} layers: the plan", "", "", "", f"{plan.stat().st_size:,}"]]
    for name, arguments in commands.items():
        walls, cpu_s, written = timed(arguments, repeats)
        median, most = statistics.median(walls), max(walls)
        size = f"{written:,}"
        if name == "report":
            size = f"{page.stat().st_size:,} + {trace.stat().st_size:,}"
        found.append([name, *(f"{s:.2f} s" for s in (median, most, cpu_s)), size])
    return found


@click.command(help=__doc__)
@click.option("--layers", multiple=True, type=click.IntRange(1), default=(2, 80, 126))
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(layers: tuple[int, ...], repeats: int, as_markdown: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        lines = [row for n in layers for row in rows(n, Path(folder), repeats)]
    if as_markdown:
        click.echo(markdown(HEADER, lines))
    else:
        show("Commands on stored plans, wall seconds", HEADER, lines, 100)


if __name__ == "__main__":
    main()
