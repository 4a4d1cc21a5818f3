"""Time against memory on one device: autopar's plans beside torch's min-cut partitioner.

    python -m benchmarks.partitioner                       # GPT-2 and Llama, seven budgets
    python -m benchmarks.partitioner --model gpt2 --rounds 20 --markdown

For each `activation_memory_budget` of torch a step (forward, backward) is compiled by it
(`aot_eager_decomp_partition`: op by op, on the CPU), and its peak is measured: what is allocated at
most beyond what is there before the step, parameters and gradients to add to. autopar gets all that
as its memory limit, and its step is measured alike. Then the two take turns; times are medians over
the rounds.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from benchmarks.tables import markdown, show

if TYPE_CHECKING:
    from torch import nn

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.15, 0.05, 0.0)
"""Parts of what keeping all takes; 0 makes everything again."""

WORDS, BATCH, SEQUENCE = 2048, 8, 128
WARMUP_ROUNDS = 2
HEADER = (
    "model", "budget", "torch's MiB", "autopar's", "predicted", "torch's ms", "autopar's",
    "predicted", "ratio",
)  # fmt: skip


class Step(NamedTuple):
    """A step that can be run, its peak in bytes beyond what is there before it; what autopar
    predicts of its plan, if it is one."""

    run: Callable[[], None]
    peak_bytes: int
    predicted_bytes: int = 0
    predicted_ns: int = 0


class Row(NamedTuple):
    """One budget of one model; `ours` is None where autopar has no plan within the peak."""

    model: str
    budget: float
    theirs: Step
    ours: Step | None
    their_ms: float
    our_ms: float | None


def peak_bytes(run: Callable[[], None]) -> int:
    """What a run allocates at most at a time, by torch's own count of the CPU's memory."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    held = [e for e in events if e.get("name") == "[memory]"]
    held.sort(key=lambda event: event["ts"])
    changes = [int(event["args"]["Bytes"]) for event in held]
    totals = [int(event["args"]["Total Allocated"]) for event in held]
    return max(totals) - (totals[0] - changes[0])


def stepping(model: nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=False)
        model(**batch).loss.backward()

    return run


def torchs(model: nn.Module, batch: dict[str, Any], budget: float) -> Step:
    """The step as torch partitions it."""
    import torch

    from benchmarks.torch_private import memory_budget

    torch.compiler.reset()
    compiled: Any = torch.compile(deepcopy(model), backend="aot_eager_decomp_partition")
    run = stepping(compiled, batch)
    with memory_budget(budget):
        run()
    return Step(run, peak_bytes(run))


def autopars(model: nn.Module, batch: dict[str, Any], limit_bytes: int) -> Step | None:
    """The step as autopar plans it with as much beside parameters and gradients, or None if nothing
    fits."""
    import autopar
    from autopar.errors import InfeasibleError

    stored = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        planned = autopar.compile(
            deepcopy(model), mesh="1", optimizer="sgd", memory={"limit": stored + limit_bytes}
        )
        run = stepping(planned, batch)
        run()
    except InfeasibleError as error:
        click.echo(f"{error}", err=True)
        return None
    (plan,) = planned.plans
    found = plan.estimates
    predicted_bytes = found.memory.total - stored
    return Step(run, peak_bytes(run), predicted_bytes, found.step_ns - found.optimizer_ns)


def medians(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Milliseconds of each, in turns, in another order every round."""
    taken: list[list[float]] = [[] for _ in runs]
    for k in range(WARMUP_ROUNDS + rounds):
        for i in (*range(k % len(runs), len(runs)), *range(k % len(runs))):
            start_s = time.perf_counter()
            runs[i]()
            taken[i].append((time.perf_counter() - start_s) * 1e3)
    return [statistics.median(each[WARMUP_ROUNDS:]) for each in taken]


def measure(name: str, budget: float, rounds: int) -> Row:
    """One budget of one model, on this thread."""
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    model = {"gpt2": models.gpt2_small, "llama": models.llama_small}[name]()
    batch = models.tokens(WORDS, BATCH, SEQUENCE, "cpu")
    theirs = torchs(model, batch, budget)
    ours = autopars(model, batch, theirs.peak_bytes)
    runs = [theirs.run, *([ours.run] if ours else [])]
    their_ms, *rest = medians(runs, rounds)
    return Row(name, budget, theirs, ours, their_ms, rest[0] if rest else None)


def cells(row: Row) -> list[str]:
    ours = row.ours
    left = [row.model, f"{row.budget:g}", _mib(row.theirs.peak_bytes)]
    if ours is None or row.our_ms is None:
        return [*left, "no plan", "", f"{row.their_ms:.0f}", "", "", ""]
    return [
        *left, _mib(ours.peak_bytes), _mib(ours.predicted_bytes), f"{row.their_ms:.0f}",
        f"{row.our_ms:.0f}", f"{ours.predicted_ns / 1e6:.0f}", f"{row.our_ms / row.their_ms:.2f}",
    ]  # fmt: skip


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--model", "names", multiple=True, type=click.Choice(("gpt2", "llama")))
@click.option("--budget", "budgets", multiple=True, type=click.FloatRange(0, 1), help="Of torch.")
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(min=1))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(
    names: tuple[str, ...], budgets: tuple[float, ...], rounds: int, as_markdown: bool
) -> None:
    import torch

    torch.set_num_threads(1)
    rows = [
        cells(measure(name, budget, rounds))
        for name in names or ("gpt2", "llama")
        for budget in budgets or BUDGETS
    ]
    if as_markdown:
        click.echo(markdown(HEADER, rows))
    else:
        show("A step at the peak of torch's partitioner", HEADER, rows, 100)


if __name__ == "__main__":
    main()
