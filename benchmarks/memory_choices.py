"""What it costs in planning to decide what saves memory: CPU seconds to plan Llama within the
memory of its devices, with what is recomputed and offloaded to be decided, beside planning it
without either and without a limit. Each is a process of its own, its imports included.

    python -m benchmarks.memory_choices
    python -m benchmarks.memory_choices --case 8b:8xH100:8:64:2048 --markdown

A case is a size, a cluster, a mesh, a batch and the length of its sequences.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from unittest.mock import patch

import click
import msgspec

from benchmarks.plan_time import NO_LIMIT_BYTES
from benchmarks.processes import told_by
from benchmarks.tables import tell

CASES = (
    "8b:8xH100:8:64:2048",
    "8b:8x8xH100:8x8:64:2048",
    "70b:8x8xH100:8x8:64:4096",
    "405b:64x8xH100:64x8:512:2048",
)
HEADER = ("Llama", "mesh", "batch", "without", "with", "ratio", "step", "peak", "gap")
TITLE = "CPU seconds from start to plan; step in seconds, peak in GiB"


class Planned(msgspec.Struct, frozen=True):
    """One plan: CPU seconds of the process until it was there, and what it is."""

    cpu_s: float
    step_s: float
    peak_bytes: int
    gap_ppm: int


def measure(case: str, *, decides: bool) -> Planned:
    """Plan a case in this process, which has done nothing yet; `decides` what saves memory within
    that of a device, or nothing without a limit."""
    import torch

    from autopar.cluster.parsing import parse_cluster
    from autopar.driver.planning import answer
    from autopar.plans.requests.options import Options
    from autopar.plans.requests.request import PlanRequest, make_graph_request
    from autopar.tracer import trace
    from benchmarks.models import llama, tokens

    size, cluster, mesh, batch, length = case.split(":")
    with torch.device("meta"):
        graph = trace(llama(size), (), tokens(128_256, int(batch), int(length), "meta")).graph
    options = Options(mesh=mesh, memory_limit_bytes=None if decides else NO_LIMIT_BYTES)
    closed = patch.object(PlanRequest, "opened", PlanRequest.without_savings)

    def say(text: str) -> None:
        click.echo(f"{case}: {text}", err=True)

    with nullcontext() if decides else closed:
        found = answer(make_graph_request(graph, parse_cluster(cluster), options), say)
    estimates, gap_ppm = found.estimates, found.provenance.gap_ppm
    peak_bytes = estimates.memory.total
    return Planned(time.process_time(), estimates.step_ns / 1e9, peak_bytes, gap_ppm)


def in_own_process(case: str, *, decides: bool) -> Planned:
    """`measure` in a fresh process with one thread."""
    more = ["--decides"] if decides else []
    told = told_by("benchmarks.memory_choices", "--worker", "--case", case, *more)
    return msgspec.json.decode(told, type=Planned)


def row(case: str, without: Planned, found: Planned) -> list[str]:
    """A case as cells, in the order of `HEADER`."""
    size, cluster, mesh, batch, length = case.split(":")
    return [
        f"{size.upper()} on {cluster}",
        mesh,
        f"{batch} x {length}",
        f"{without.cpu_s:.1f}",
        f"{found.cpu_s:.1f}",
        f"{found.cpu_s / without.cpu_s:.2f}",
        f"{found.step_s:.4g}",
        f"{found.peak_bytes / 2**30:.1f}",
        f"{found.gap_ppm / 1e4:.2g} %",
    ]


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, default=CASES, metavar="CASE")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--decides", is_flag=True, hidden=True)
def main(cases: tuple[str, ...], as_markdown: bool, worker: bool, decides: bool) -> None:
    if worker:
        click.echo(msgspec.json.encode(measure(cases[0], decides=decides)))
        return
    rows = [
        row(case, *(in_own_process(case, decides=decides) for decides in (False, True)))
        for case in cases
    ]
    tell(TITLE, HEADER, rows, as_markdown=as_markdown, width=120)


if __name__ == "__main__":
    main()
