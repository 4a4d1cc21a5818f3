"""From a model to a plan in stages: CPU seconds in a process of its own, its imports included, with
the numbers of stages and microbatches, the schedule, the meshes and what saves memory all open.
Logits are left out: those of a whole batch take more memory than anything else, and no one reads
them in training.

    python -m benchmarks.stages
    python -m benchmarks.stages --case 405b:512x8xH100:2048:8192 --markdown

A case is a size of Llama, a cluster, a batch and the length of its sequences.
"""

from __future__ import annotations

import time

import click
import msgspec

from autopar.ir.gc_pause import collection_paused
from benchmarks.processes import told_by
from benchmarks.tables import tell

CASES = (
    "8b:4x8xH100:64:2048",
    "8b:64x8xH100:512:2048",
    "8b:64x8xL4:512:2048",
    "70b:8x8xH100:128:4096",
    "405b:512x8xH100:2048:8192",
)
HEADER = ("Llama", "batch", "CPU s", "pipeline", "mesh of a stage", "step", "MFU", "peak", "gap")
TITLE = "CPU seconds from start to plan; step in seconds, peak in GiB"


class Planned(msgspec.Struct, frozen=True):
    """One plan: CPU seconds of the process until it was there, and what it is. `gap_ppm` is that of
    how the work is divided."""

    cpu_s: float
    pipeline: str
    mesh: str
    step_s: float
    mfu_ppm: int
    peak_bytes: int
    gap_ppm: int


@collection_paused()
def measure(case: str) -> Planned:
    """Plan a case in this process, which has done nothing yet, without looking for cycles of what
    is left, as `autopar plan` does."""
    import torch

    from autopar.cluster.parsing import parse_cluster
    from autopar.compile import ModelCall, plan_call
    from autopar.driver.planning import answer
    from autopar.plans.plan import Plan
    from autopar.plans.requests.read_options import make_options
    from autopar.plans.requests.request import make_graph_request
    from autopar.tracer import Traced
    from benchmarks.models import llama, tokens

    size, cluster, batch, length = case.split(":")
    options = make_options(
        microbatches="auto", pipeline={"stages": "auto"}, outputs={"unread": ["logits"]}
    )

    def say(text: str) -> None:
        click.echo(f"{case}: {time.process_time():.1f} s: {text}", err=True)

    def find(traced: Traced) -> Plan:
        return answer(make_graph_request(traced.graph, parse_cluster(cluster), options), say)

    with torch.device("meta"):
        inputs = tokens(128_256, int(batch), int(length), "meta")
        _, plan = plan_call(ModelCall(llama(size), (), inputs, options), find)
    structure, estimates = plan.structure, plan.estimates
    stages, count = len(structure.stages), structure.microbatches
    return Planned(
        time.process_time(),
        f"{stages} stages, {structure.schedule} of {count}" if stages > 1 else "none",
        structure.stages[0].mesh.text,
        estimates.step_ns / 1e9,
        estimates.mfu_ppm,
        estimates.memory.total,
        plan.provenance.gap_ppm,
    )


def in_own_process(case: str) -> Planned:
    """`measure` in a fresh process with one thread."""
    told = told_by("benchmarks.stages", "--worker", "--case", case)
    return msgspec.json.decode(told, type=Planned)


def row(case: str, found: Planned) -> list[str]:
    """A case as cells, in the order of `HEADER`."""
    size, cluster, batch, length = case.split(":")
    return [
        f"{size.upper()} on {cluster}",
        f"{batch} x {length}",
        f"{found.cpu_s:.1f}",
        found.pipeline,
        found.mesh,
        f"{found.step_s:.4g}",
        f"{found.mfu_ppm / 1e4:.1f} %",
        f"{found.peak_bytes / 2**30:.1f}",
        f"{found.gap_ppm / 1e4:.2g} %",
    ]


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, default=CASES, metavar="CASE")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(cases: tuple[str, ...], as_markdown: bool, worker: bool) -> None:
    if worker:
        click.echo(msgspec.json.encode(measure(cases[0])))
        return
    rows = [row(case, in_own_process(case)) for case in cases]
    tell(TITLE, HEADER, rows, as_markdown=as_markdown)


if __name__ == "__main__":
    main()
