"""How long planning and rewriting Llama-8B takes: CPU seconds by phase, problem size, memory.

Each case has a process of its own, so that its peak memory is its own:

    python -m benchmarks.plan_time                            # all cases, 32 layers
    python -m benchmarks.plan_time --case 8x8 --layers 3 --markdown

A case is the nodes and devices of a cluster of H100s, which are the mesh as well unless one follows
after a colon: `64x8:8x8x8` is three axes on 512 devices, `8x8:auto` the search over all meshes. An
`@512` at its end is the number of sequences of the batch, which are 64 otherwise.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from unittest.mock import patch

import click
import msgspec

from benchmarks.tables import tell

if TYPE_CHECKING:
    from autopar.ir.graph import Graph
    from autopar.plans.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
CASES = ("8", "8x8", "32x8", "64x8:8x8x8", "64x8:8x8x8@512", "8x8:auto")
PHASES = ("import", "build", "trace", "price", "solve", "plan", "rewrite")
HEADER = ("H100", *PHASES, "total", "nodes", "variables", "rows", "peak", "step", "proof")
VOCABULARY, BATCH, SEQUENCE = 128_256, 64, 2048
NO_LIMIT_BYTES = 2**44

P = ParamSpec("P")
R = TypeVar("R")
Tell = Callable[[str], None]


class Result(msgspec.Struct, frozen=True):
    """One case: CPU seconds of each of `PHASES`, and what came out. `note` says what to know."""

    case: str
    layers: int
    cpu_s: dict[str, float]
    graph_nodes: int
    variables: int
    rows: int
    peak_bytes: int
    step_s: float
    status: str
    gap_ppm: int
    note: str


class Phases:
    """Sums the CPU seconds of this process by phase; what is nested counts for the inner one."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inner_s = 0.0

    def timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, whose time counts as `phase`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            outer_inner_s, self._inner_s = self._inner_s, 0.0
            start_s = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken_s = time.process_time() - start_s
                self.cpu_s[phase] += taken_s - self._inner_s
                self._inner_s = outer_inner_s + taken_s

        return call


def measure(case: str, layers: int, tell: Tell) -> Result:
    """Plan and rewrite in this process, which has done nothing but import so far."""
    import torch

    from autopar.compile import rewritten
    from autopar.errors import InfeasibleError
    from autopar.tracer import trace
    from benchmarks.models import llama_8b, tokens

    phases = Phases()
    phases.cpu_s["import"] = time.process_time()
    with torch.device("meta"):
        model = phases.timed("build", llama_8b)(layers)
        inputs = tokens(VOCABULARY, _batch(case), SEQUENCE, "meta")
    tell("tracing")
    traced = phases.timed("trace", trace)(model, (), inputs)
    note = ""
    try:
        found = phases.timed("plan", _plan)(traced.graph, case, None, phases, tell)
    except InfeasibleError as error:
        note = f"planned without a memory limit: {error}"
        phases.cpu_s.update(dict.fromkeys(("price", "solve", "plan"), 0.0))
        found = phases.timed("plan", _plan)(traced.graph, case, NO_LIMIT_BYTES, phases, tell)
    tell("rewriting")
    phases.timed("rewrite", rewritten)(traced, found)
    return Result(
        case=case,
        layers=layers,
        cpu_s=phases.cpu_s,
        graph_nodes=len(traced.graph.nodes),
        variables=int(found.provenance.statistics["variables"]),
        rows=int(found.provenance.statistics["rows"]),
        peak_bytes=peak_bytes(),
        step_s=found.estimates.step_ns / 1e9,
        status=found.provenance.status,
        gap_ppm=found.provenance.gap_ppm,
        note=note,
    )


def _plan(graph: Graph, case: str, limit_bytes: int | None, phases: Phases, tell: Tell) -> Plan:
    from autopar.cluster.parsing import parse_cluster
    from autopar.driver.planning import answer
    from autopar.plans.requests.options import Options
    from autopar.plans.requests.request import make_graph_request

    flow = import_module("autopar.compile")
    devices, _, mesh = case.partition("@")[0].partition(":")
    with ExitStack() as stack:
        for phase in ("price", "solve"):
            timed = phases.timed(phase, getattr(flow, phase))
            stack.enter_context(patch.object(flow, phase, timed))
        options = Options(mesh=mesh or devices, memory_limit_bytes=limit_bytes)
        return answer(make_graph_request(graph, parse_cluster(f"{devices}xH100"), options), tell)


def _batch(case: str) -> int:
    return int(case.partition("@")[2] or BATCH)


def peak_bytes() -> int:
    # Kilobytes on Linux, bytes on macOS: getrusage(2).
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_own_process(case: str, layers: int) -> Result | None:
    """`measure` in a fresh process with one thread; None, after its traceback, if it fails."""
    command = [sys.executable, "-m", "benchmarks.plan_time", "--worker", "--case", case]
    done = subprocess.run(
        [*command, "--layers", str(layers)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        click.echo(f"{case}: failed with status {done.returncode}", err=True)
        return None
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Result)


def row(result: Result) -> list[str]:
    """A result as cells, in the order of `HEADER`."""
    gap = "" if result.status == "optimal" else f", gap {result.gap_ppm / 1e4:.2g} %"
    return [
        result.case + ("*" if result.note else ""),
        *(f"{result.cpu_s[phase]:.2f}" for phase in PHASES),
        f"{sum(result.cpu_s.values()):.2f}",
        f"{result.graph_nodes:,}",
        f"{result.variables:,}",
        f"{result.rows:,}",
        f"{result.peak_bytes / 2**30:.2f}",
        f"{result.step_s:.4g}",
        result.status + gap,
    ]


def report(results: list[Result], *, as_markdown: bool) -> None:
    """Print the table, and the notes below it."""
    title = (
        f"Llama-8B, layers: {results[0].layers}, sequence: {SEQUENCE}, batch: {BATCH}. CPU seconds "
        "by phase, peak memory of the process in GiB, predicted step in seconds"
    )
    rows = [row(result) for result in results]
    tell(title, HEADER, rows, as_markdown=as_markdown)
    for result in results:
        if result.note:
            click.echo(f"\n* {result.case}: {result.note}")


def run(cases: tuple[str, ...], layers: int, *, as_markdown: bool) -> bool:
    """Measure the cases, one after the other, and print the table; False if one failed."""
    results = [in_own_process(case, layers) for case in cases]
    done = [result for result in results if result is not None]
    if done:
        report(done, as_markdown=as_markdown)
    return len(done) == len(results)


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, default=CASES, metavar="8x8", help="H100s[:mesh].")
@click.option("--layers", type=click.IntRange(1), default=32, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(cases: tuple[str, ...], layers: int, as_markdown: bool, worker: bool) -> None:
    if not worker:
        sys.exit(not run(cases, layers, as_markdown=as_markdown))
    (case,) = cases
    result = measure(case, layers, lambda text: click.echo(f"{case}: {text}", err=True))
    click.echo(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
