"""The tables: every run, errors by group, ranks, memory, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click
import numpy as np

from benchmarks.published.predict import Prediction
from benchmarks.published.runs import Run, reasons
from benchmarks.published.scores import errors, grouped, regret, rule_of_thumb, spearman
from benchmarks.tables import markdown, show


class Judged(NamedTuple):
    """A run, what autopar says of it, and what the rival says: tokens per second and device, None
    where it has no other run to be fitted on."""

    run: Run
    predicted: Prediction
    rival: float | None


LONG = 8192
"""From so many tokens on a sequence is long: attention is a good part of the step."""


def _plain(run: Run) -> bool:
    return run.workload is None and run.pp == 1 and not (run.recomputes or run.recomputes_scores)


GROUPS: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("no recompute", _plain),
    ("of them A100-40G", lambda run: _plain(run) and run.preset == "A100-40G"),
    ("of them A100", lambda run: _plain(run) and run.preset == "A100"),
    ("of them H100", lambda run: _plain(run) and run.preset == "H100"),
    (f"of them sequences below {LONG:,}", lambda run: _plain(run) and run.sequence < LONG),
    (f"of them sequences from {LONG:,} on", lambda run: _plain(run) and run.sequence >= LONG),
    ("of them one node", lambda run: _plain(run) and run.gpus <= run.gpus_per_node),
    ("of them several nodes", lambda run: _plain(run) and run.gpus > run.gpus_per_node),
    ("recompute", lambda run: run.workload is None and run.pp == 1 and not _plain(run)),
    ("compiled, with or without", lambda run: run.compiled == "1"),
    ("vTrain, full recompute", lambda run: run.workload is not None),
    ("of them one stage", lambda run: run.workload is not None and run.pp == 1),
    ("of them two stages", lambda run: run.workload is not None and run.pp == 2),
    ("of them four and more", lambda run: run.workload is not None and run.pp > 2),
    ("pipelines of others", lambda run: run.workload is None and run.pp > 1),
)
MIN_RANKED = 4
"""Ranks of fewer runs say little."""

MIN_CHOICES = 3
"""Arrangements of a workload between which to pick."""

Rows = list[list[str]]


def report(judged: Sequence[Judged], runs: Sequence[Run], *, as_markdown: bool) -> None:
    """Print all tables; `runs` are those of the whole file."""
    for title, header, rows in (
        (
            "Tokens per second and device; where the predicted step goes; memory, GiB per device",
            ("run", "apart", "batch", "measured", "predicted", "ratio", "constant's", "compute",
             "exposed", "host", "bubble", "optimizer", "memory", "of", "measured"),
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
            "Arrangements of a workload: how much slower the one picked is than the best measured",
            ("picked by", "among", "workloads", "the best", "mean", "worst", "Spearman, median",
             "mean"),
            choice_rows(judged),
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
    known = [(p.peak_bytes, p.memory_bytes) for _, p, _ in judged if p.peak_bytes is not None]
    expressed = sum(not reasons(run) for run in runs)
    click.echo(
        f"{expressed} of {len(runs)} runs can be expressed, {len(judged)} are shown. All ran; of "
        f"{len(known)} whose memory is predicted, {sum(peak > limit for peak, limit in known)} do "
        "not fit by autopar's count"
    )


def run_rows(judged: Sequence[Judged]) -> Rows:
    """A line per run; times are parts of the predicted step."""
    found: Rows = []
    for run, predicted, rival in judged:
        parts = (
            predicted.compute_s,
            predicted.exposed_communication_s,
            predicted.host_s,
            predicted.bubble_s,
            predicted.optimizer_s,
        )
        found.append([
            run.name,
            "yes" if run.kept_apart else "",
            f"{run.microbatch}x{run.microbatches}",
            f"{run.tokens_s_gpu:,.0f}",
            f"{predicted.tokens_s_gpu:,.0f}",
            f"{predicted.tokens_s_gpu / run.tokens_s_gpu:.2f}",
            "" if rival is None else f"{rival / run.tokens_s_gpu:.2f}",
            *(f"{part / predicted.step_s:.0%}" for part in parts),
            "" if predicted.peak_bytes is None else f"{predicted.peak_bytes / 2**30:.1f}",
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
    plain = [each for each in judged if _plain(each.run)]
    for (model, preset), members in grouped(plain, lambda e: (e.run.model, e.run.preset)).items():
        if len(members) < MIN_RANKED or any(e.rival is None for e in members):
            continue
        measured = [e.run.tokens_s_gpu for e in members]
        own = spearman([e.predicted.tokens_s_gpu for e in members], measured)
        rival = spearman([e.rival for e in members if e.rival is not None], measured)
        found.append([f"{model}, {preset}", str(len(members)), f"{own:.2f}", f"{rival:.2f}"])
    return found


def choice_rows(judged: Sequence[Judged]) -> Rows:
    """A line for autopar, and one for the rule of thumb, of the workloads given, of those kept
    apart, and of both, where there are `MIN_CHOICES` arrangements or more that can be expressed;
    first of all of them, then of those in stages alone."""
    found: Rows = []
    ours = [each for each in judged if each.run.workload is not None]
    staged = [each for each in ours if each.run.pp > 1]
    for among, members in (("all", ours), ("stages", staged)):
        workloads = grouped(members, lambda e: e.run.workload).values()
        large = [each for each in workloads if len(each) >= MIN_CHOICES]
        for where, sides in (("given", (False,)), ("kept apart", (True,)), ("both", (False, True))):
            shown = [each for each in large if each[0].run.kept_apart in sides]
            if shown:
                found += _picks(shown, among, where)
    return found


def _picks(workloads: Sequence[Sequence[Judged]], among: str, where: str) -> Rows:
    measured = [[e.run.tokens_s_gpu for e in members] for members in workloads]
    own = [[e.predicted.tokens_s_gpu for e in members] for members in workloads]
    thumb = [rule_of_thumb([e.run for e in members]) for members in workloads]
    found: Rows = []
    for name, speeds in (("autopar", own), ("rule of thumb", thumb)):
        lost = [regret(*pair) for pair in zip(speeds, measured, strict=True)]
        ranks = [spearman(*pair) for pair in zip(speeds, measured, strict=True)]
        best = sum(each == 0 for each in lost)
        found.append([
            f"{name}, {where}", among, str(len(workloads)), f"{best / len(lost):.0%}",
            f"{np.mean(lost):.1%}", f"{max(lost):.1%}", f"{np.nanmedian(ranks):.2f}",
            f"{np.nanmean(ranks):.2f}",
        ])  # fmt: skip
    return found


def reason_rows(runs: Sequence[Run]) -> Rows:
    """A line per reason, the most frequent first."""
    given = [reasons(run) for run in runs]
    counts = Counter(reason for found in given for reason in found)
    alone = Counter(found[0] for found in given if len(found) == 1)
    return [[reason, str(count), str(alone[reason])] for reason, count in counts.most_common()]
