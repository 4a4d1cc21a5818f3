"""Step time of autopar's plan beside DistributedDataParallel, fully_shard and a plan by hand.

    python -m benchmarks.step_time                             # GPT-2, Llama and a ResNet
    python -m benchmarks.step_time --model gpt2 --rounds 40 --markdown

Four gloo processes on this machine train copies of one model on one batch, with AdamW. The losses
of the first steps must agree. Then the contenders take turns, one step each per round and in
another order every round, so that whatever else the machine does meets all alike. A step lasts from
a barrier to the end of its slowest rank; figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import click
import msgspec

from benchmarks.processes import run_ranks
from benchmarks.tables import markdown, show

if TYPE_CHECKING:
    from benchmarks.contenders import Case, Contender

RANKS = 4
CHECKED_STEPS = 3
WARMUP_ROUNDS = 2
TOLERANCE = 1e-4
TELLING = "DDP, loss reduced"
"""Shown, and not among those that autopar is measured against."""
HEADER = ("model", "contender", "median ms", "fastest ms", "of the best other")


class Result(msgspec.Struct, frozen=True):
    """Milliseconds of every round by contender, the largest difference of losses from the first
    contender's (relative), and what autopar planned."""

    model: str
    step_ms: dict[str, list[float]]
    loss_error: float
    plan: str


def cases() -> dict[str, Case]:
    """Models of which a step takes some 100 to 300 ms on two cores."""
    from benchmarks import contenders, models
    from benchmarks.contenders import Case

    return {
        "gpt2": Case(
            models.gpt2_small,
            lambda: models.tokens(2048, 8, 128, "cpu"),
            contenders.given_loss,
            lambda model: model.transformer.h,
            contenders.gpt2_by_hand,
        ),
        "llama": Case(
            models.llama_small,
            lambda: models.tokens(2048, 8, 128, "cpu"),
            contenders.given_loss,
            lambda model: model.model.layers,
            contenders.llama_by_hand,
        ),
        "resnet": Case(
            models.resnet_small,
            lambda: models.images(10, 16, 32),
            contenders.returned_loss,
            contenders.resnet_blocks,
            contenders.resnet_by_hand,
        ),
    }


def measure(name: str, rounds: int) -> Result:
    """Train on this rank, together with the others."""
    import torch

    from benchmarks import contenders

    case = cases()[name]
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    makers = (
        contenders.planned(),
        contenders.data_parallel,
        contenders.data_parallel_telling,
        contenders.sharded(case.blocks),
        contenders.by_hand(case.by_hand),
    )
    found = [make(deepcopy(model), batch, case.loss) for make in makers]
    error = loss_error(found)
    times = time_rounds(found, rounds)
    plan = contenders.plan_of(found[0])
    return Result(name, times, error, describe(plan))


def loss_error(found: Sequence[Contender]) -> float:
    """The largest difference of the contenders' first losses from the first one's, relative."""
    losses = [[each.global_loss() for _ in range(CHECKED_STEPS)] for each in found]
    return max(
        abs(mine - first) / abs(first)
        for theirs in losses
        for mine, first in zip(theirs, losses[0], strict=True)
    )


def time_rounds(
    found: list[Contender], rounds: int, *, warmup_rounds: int = WARMUP_ROUNDS
) -> dict[str, list[float]]:
    """Milliseconds of each contender's steps, until the slowest rank is done."""
    import torch
    import torch.distributed as dist

    taken_ms: dict[str, list[float]] = {each.name: [] for each in found}
    for k in range(warmup_rounds + rounds):
        first = k % len(found)
        for each in found[first:] + found[:first]:
            dist.barrier()
            start_s = time.perf_counter()
            each.step()
            taken_ms[each.name].append((time.perf_counter() - start_s) * 1e3)
    table = torch.tensor([times[warmup_rounds:] for times in taken_ms.values()])
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(taken_ms, table.tolist(), strict=True))


def describe(plan: Any) -> str:
    """The mesh, how parameters are stored, and what is predicted; of a pipeline its stages."""
    predicted_ms = plan.estimates.step_ns / 1e6
    if plan.structure.is_pipeline:
        starts = ", ".join(stage.start or "the first" for stage in plan.structure.stages)
        order = f"{plan.structure.schedule} of {plan.structure.microbatches}"
        return f"stages begin with {starts}; {order}; predicted {predicted_ms:.0f} ms"
    counts: dict[str, int] = {}
    for param in plan.structure.params.values():
        counts[param.storage] = counts.get(param.storage, 0) + 1
    stored = ", ".join(f"{n} {storage}" for storage, n in sorted(counts.items()))
    mesh = plan.structure.mesh_text
    sent = ", ".join(
        f"{total.count} {total.kind} {total.phase} ({total.num_bytes / 2**20:.2f} MiB)"
        for total in plan.estimates.stages[0].collectives
    )
    return f"mesh {mesh}; stored {stored}; {sent}; predicted {predicted_ms:.0f} ms"


def in_own_processes(name: str, rounds: int) -> Result | None:
    """`measure` on four fresh processes of one thread each; None if one fails."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--worker"]
    told = run_ranks([*command, "--model", name, "--rounds", str(rounds)], RANKS)
    if told is None:
        click.echo(f"{name}: failed", err=True)
        return None
    return msgspec.json.decode(told.splitlines()[-1], type=Result)


def rows(result: Result) -> list[list[str]]:
    """A result as rows of cells, in the order of `HEADER`; autopar's first."""
    medians = {name: statistics.median(times) for name, times in result.step_ms.items()}
    best = min(ms for name, ms in medians.items() if name not in ("autopar", TELLING))
    return [
        [result.model, name, f"{ms:.1f}", f"{min(result.step_ms[name]):.1f}", f"{ms / best:.2f}"]
        for name, ms in medians.items()
    ]


def run(models: Iterable[str], rounds: int, *, as_markdown: bool) -> bool:
    """Measure the models, one after the other, and print the table; False if one failed or did not
    train alike."""
    results = [in_own_processes(name, rounds) for name in models]
    done = [result for result in results if result is not None]
    cells = [row for result in done for row in rows(result)]
    title = f"Step time on {RANKS} gloo processes, {rounds} rounds"
    if as_markdown:
        click.echo(f"{title}\n\n{markdown(HEADER, cells)}\n")
    else:
        show(title, HEADER, cells, 100)
    for result in done:
        click.echo(f"{result.model}: losses differ by {result.loss_error:.1e}; {result.plan}")
    return len(done) == len(results) and all(r.loss_error < TOLERANCE for r in done)


def work(name: str, rounds: int) -> Result:
    """What one of the processes does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return measure(name, rounds)
    finally:
        dist.destroy_process_group()


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, default=("gpt2", "llama", "resnet"))
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(models: tuple[str, ...], rounds: int, as_markdown: bool, worker: bool) -> None:
    if not worker:
        sys.exit(not run(models, rounds, as_markdown=as_markdown))
    click.echo(msgspec.json.encode(work(models[0], rounds)))


if __name__ == "__main__":
    main()
