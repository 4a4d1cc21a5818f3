"""The best runs that others published, beside what autopar predicts of them:

    python -m benchmarks.records                        # all: an hour of CPU time
    python -m benchmarks.records --only llama31_8b --markdown

`benchmarks/data/records.csv` names rows of `published.csv`: for a model on a cluster the fastest
dense run in bfloat16 that states its batch. No figure may be fitted to those `held out`, though
they were in sight when terms were chosen (`Run.kept_apart` is another choice). There are
two predictions of each. `own` is of the run as it was arranged (`benchmarks.published`). `chosen`
is of the plan that autopar makes of the same model, batch and cluster, with nothing else said. It
has the kernels of autopar's presets, and not those of the record's trainer.

What is stored has two bytes in the model that is planned, and four in these runs. That much less
memory is given to the chosen plan (`memory_limit`), as if what is stored were shared out to all.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import click
import msgspec

from benchmarks.plan_time import ROOT
from benchmarks.published.runs import DATA, FILES, Run, read, reasons
from benchmarks.tables import tell

TITLE = "Tokens per second and device, of the record"
HEADER = (
    "record",
    "set",
    "measured",
    "own",
    "chosen",
    "MFU %",
    "gap %",
    "host GiB",
    "CPU s",
    "plan",
)

_STORED = 4
"""Parameters, gradients and two states of AdamW: tensors as large as the parameters."""
_PLANNED_BYTES = 2


class Chosen(msgspec.Struct, frozen=True):
    """The plan that autopar makes: tokens per second and device, and what it is. `why` says why
    there is none."""

    tokens_s_gpu: float = 0.0
    mfu_ppm: int = 0
    gap_ppm: int = 0
    host_bytes: int = 0
    cpu_s: float = 0.0
    text: str = ""
    why: str = ""


@dataclass(frozen=True)
class Record:
    """A run, and whether figures may be fitted to it (`given`)."""

    run: Run
    kind: str


def records() -> tuple[Record, ...]:
    """The runs that `records.csv` names. KeyError if one is not among the published ones."""
    runs = {run.name: run for path in FILES for run in read(path)}
    with (DATA / "records.csv").open(newline="", encoding="utf-8") as file:
        return tuple(Record(runs[row["name"]], row["set"]) for row in csv.DictReader(file))


def memory_limit(run: Run, parameters: int, memory_bytes: int) -> int:
    """Of a device's memory what the plan may use, in bytes: without what the run held more of
    parameters, gradients and states, since these had four bytes each, on all devices."""
    from benchmarks.published.decoder import STORED_PER_PLANNED

    more = (STORED_PER_PLANNED - 1) * _PLANNED_BYTES
    return memory_bytes - more * _STORED * parameters // run.gpus


def without_trainer(run: Run) -> Run:
    """The run without what its trainer recomputed, and without its kernels."""
    model = run.model.replace("MPT", "GPT")
    return msgspec.structs.replace(run, recompute="none", compiled="", cp=1, model=model)


def chosen_plan(run: Run) -> Chosen:
    """Plans the model and batch of a run, on its cluster, in this process."""
    import torch

    import autopar
    from autopar.errors import AutoparError
    from benchmarks.published.decoder import Decoder
    from benchmarks.published.predict import cluster_of

    begin_s = time.process_time()
    free = without_trainer(run)
    cluster = cluster_of(free)
    with torch.device("meta"):
        model = Decoder(free)
        tokens = torch.empty(run.global_batch, run.sequence, dtype=torch.int64)
    parameters = sum(each.numel() for each in model.parameters())
    limit = memory_limit(run, parameters, cluster.device.memory_bytes)
    try:
        plan = autopar.plan(model, (tokens, tokens), cluster=cluster, memory={"limit": limit})
    except AutoparError as error:
        return Chosen(cpu_s=time.process_time() - begin_s, why=f"{error}")
    step_s = plan.estimates.step_ns / 1e9
    first = plan.structure.stages[0]
    parts = [f"{len(plan.stages)} x {first.mesh}", f"{first.microbatches} microbatches"]
    if first.loss_chunks > 1:
        parts.append(f"{first.loss_chunks} chunks of the loss")
    return Chosen(
        tokens_s_gpu=run.global_batch * run.sequence / step_s / run.gpus,
        mfu_ppm=plan.estimates.mfu_ppm,
        gap_ppm=plan.provenance.gap_ppm,
        host_bytes=max(stage.estimates.host_bytes for stage in plan.stages),
        cpu_s=time.process_time() - begin_s,
        text=", ".join([*parts, plan.provenance.status]),
    )


class Predicted(msgspec.Struct, frozen=True):
    """Of a record: tokens per second and device as it was arranged, None where that is not
    expressed, and the plan that autopar makes."""

    own: float | None
    chosen: Chosen


def measure(record: Record) -> Predicted:
    """Both predictions, in this process."""
    from benchmarks.published.predict import predict

    own = None if reasons(record.run) else predict(record.run).tokens_s_gpu
    return Predicted(own, chosen_plan(record.run))


def in_own_process(record: Record) -> Predicted:
    """`measure` in a fresh process with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.records", "--worker", "--only", record.run.name],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Predicted)


def row(record: Record, found: Predicted) -> list[str]:
    """A record as cells, in the order of `HEADER`."""
    measured, chosen = record.run.tokens_s_gpu, found.chosen
    own = "" if found.own is None else f"{found.own / measured:.3f}"
    cells = [record.run.name, record.kind, f"{measured:.0f}", own]
    if not chosen.tokens_s_gpu:
        return [*cells, "none", "", "", "", f"{chosen.cpu_s:.0f}", chosen.why]
    return [
        *cells,
        f"{chosen.tokens_s_gpu / measured:.3f}",
        f"{chosen.mfu_ppm / 1e4:.1f}",
        f"{chosen.gap_ppm / 1e4:.2g}",
        f"{chosen.host_bytes / 2**30:.1f}",
        f"{chosen.cpu_s:.0f}",
        chosen.text,
    ]


LEAST, MOST = 0.95, 1.12
"""What the chosen plan of a record may be predicted to do, in parts of the record."""


def summary(found: Mapping[str, tuple[Record, Predicted]]) -> str:
    """How far predictions are from the records."""
    lines: list[str] = []
    for kind in ("given", "held out"):
        pairs = [pair for pair in found.values() if pair[0].kind == kind]
        own = [abs(p.own / r.run.tokens_s_gpu - 1) for r, p in pairs if p.own is not None]
        ratios = [p.chosen.tokens_s_gpu / r.run.tokens_s_gpu for r, p in pairs]
        within = sum(LEAST <= ratio <= MOST for ratio in ratios)
        if own:
            lines.append(
                f"{kind}: own within {100 * median(own):.1f} % (median of {len(own)}), chosen "
                f"within {LEAST} to {MOST}: {within} of {len(ratios)}"
            )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--only", default="", metavar="TEXT", help="Only records whose name has it.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(only: str, as_markdown: bool, worker: bool) -> None:
    chosen = [record for record in records() if only in record.run.name]
    if not chosen:
        raise click.ClickException(f"no record has {only!r} in its name")
    if worker:
        (record,) = (each for each in chosen if each.run.name == only)
        click.echo(msgspec.json.encode(measure(record)))
        return
    found: dict[str, tuple[Record, Predicted]] = {}
    for record in chosen:
        found[record.run.name] = record, in_own_process(record)
        click.echo(": ".join(row(*found[record.run.name])), err=True)
    tell(TITLE, HEADER, [row(*pair) for pair in found.values()], as_markdown=as_markdown, width=180)
    click.echo(summary(found))


if __name__ == "__main__":
    main()
