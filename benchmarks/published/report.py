"""The tables: every run, errors by group, ranks, memory, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click
import numpy as np

from benchmarks.published.predict import Prediction
from benchmarks.published.runs import Run, reasons
from benchmarks.published.scores import errors, grouped, spearman
from benchmarks.tables import markdown, show


class Judged(NamedTuple):
    """A run, what autopar says of it, and what the rival says: tokens per second and device, None
    where it has no other run to be fitted on."""

    run: Run
    predicted: Prediction
    rival: float | None


LONG = 8192
"""From so many tokens on a sequence is long: attention is a good part of the step."""
GROUPS: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("all", lambda run: True),
    ("A100-40G", lambda run: run.preset == "A100-40G"),
    ("A100", lambda run: run.preset == "A100"),
    ("H100", lambda run: run.preset == "H100"),
    (f"sequences below {LONG:,}", lambda run: run.sequence < LONG),
    (f"sequences from {LONG:,} on", lambda run: run.sequence >= LONG),
    ("one node", lambda run: run.gpus <= run.gpus_per_node),
    ("several nodes", lambda run: run.gpus > run.gpus_per_node),
)
MIN_RANKED = 4
"""Ranks of fewer runs say little."""

Rows = list[list[str]]


def report(judged: Sequence[Judged], runs: Sequence[Run], *, as_markdown: bool) -> None:
    """Print all tables; `runs` are those of the whole file."""
    for title, header, rows in (
        (
            "Tokens per second and device; where the predicted step goes; memory, GiB per device",
            ("run", "apart", "batch", "measured", "predicted", "ratio", "constant's", "compute",
             "exposed", "optimizer", "memory", "of", "measured"),
            run_rows(judged),
        ),
        (
            "|predicted / measured - 1|: median, 90th percentile, and of the constant",
            ("group", "given", "median", "p90", "constant", "p90", "kept apart", "median", "p90",
             "constant", "p90"),
            group_rows(judged),
        ),
        (
            "Spearman's rank correlation of tokens/s, runs of one model on one kind of device",
            ("model", "runs", "autopar", "constant"),
            rank_rows(judged),
        ),
        (
            "Left out: runs by reason, and those that have no other reason",
            ("reason", "runs", "alone"),
            reason_rows(runs),
        ),
    ):  # fmt: skip
        if as_markdown:
            click.echo(f"{title}\n\n{markdown(header, rows)}\n")
        else:
            show(title, header, rows, 160)
    full = [each for each in judged if each.predicted.peak_bytes > each.predicted.memory_bytes]
    expressed = sum(not reasons(run) for run in runs)
    click.echo(
        f"{expressed} of {len(runs)} runs can be expressed, {len(judged)} are shown; all of them "
        f"ran, and by autopar's count {len(full)} do not fit"
    )


def run_rows(judged: Sequence[Judged]) -> Rows:
    """A line per run; times are parts of the predicted step."""
    found: Rows = []
    for run, predicted, rival in judged:
        parts = (predicted.compute_s, predicted.exposed_communication_s, predicted.optimizer_s)
        found.append([
            run.name,
            "yes" if run.kept_apart else "",
            f"{run.microbatch}x{run.microbatches}",
            f"{run.tokens_s_gpu:,.0f}",
            f"{predicted.tokens_s_gpu:,.0f}",
            f"{predicted.tokens_s_gpu / run.tokens_s_gpu:.2f}",
            "" if rival is None else f"{rival / run.tokens_s_gpu:.2f}",
            *(f"{part / predicted.step_s:.0%}" for part in parts),
            f"{predicted.peak_bytes / 2**30:.1f}",
            f"{predicted.memory_bytes / 2**30:.1f}",
            "" if run.peak_gib is None else f"{run.peak_gib:.1f}",
        ])  # fmt: skip
    return found


def group_rows(judged: Sequence[Judged]) -> Rows:
    """A line per group that has runs: those given, then those kept apart."""
    found: Rows = []
    for name, belongs in GROUPS:
        members = [each for each in judged if belongs(each.run)]
        halves = [[e for e in members if e.run.kept_apart is apart] for apart in (False, True)]
        if members:
            found.append([name, *_half(halves[0]), *_half(halves[1])])
    return found


def _half(members: Sequence[Judged]) -> list[str]:
    own = [(e.predicted.tokens_s_gpu, e.run.tokens_s_gpu) for e in members]
    rivals = [(e.rival, e.run.tokens_s_gpu) for e in members if e.rival is not None]
    return [str(len(members)), *_spread(own), *_spread(rivals)]


def _spread(pairs: Sequence[tuple[float, float]]) -> list[str]:
    if not pairs:
        return ["", ""]
    predicted, measured = zip(*pairs, strict=True)
    return [f"{x:.1%}" for x in np.quantile(errors(predicted, measured), (0.5, 0.9))]


def rank_rows(judged: Sequence[Judged]) -> Rows:
    """A line per model and kind of device with `MIN_RANKED` runs or more."""
    found: Rows = []
    for (model, preset), members in grouped(judged, lambda e: (e.run.model, e.run.preset)).items():
        if len(members) < MIN_RANKED or any(e.rival is None for e in members):
            continue
        measured = [e.run.tokens_s_gpu for e in members]
        own = spearman([e.predicted.tokens_s_gpu for e in members], measured)
        rival = spearman([e.rival for e in members if e.rival is not None], measured)
        found.append([f"{model}, {preset}", str(len(members)), f"{own:.2f}", f"{rival:.2f}"])
    return found


def reason_rows(runs: Sequence[Run]) -> Rows:
    """A line per reason, the most frequent first."""
    given = [reasons(run) for run in runs]
    counts = Counter(reason for found in given for reason in found)
    alone = Counter(found[0] for found in given if len(found) == 1)
    return [[reason, str(count), str(alone[reason])] for reason, count in counts.most_common()]
