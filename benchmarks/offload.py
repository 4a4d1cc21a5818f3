"""Memory saved against time lost on one device, and the largest model within little memory.

    python -m benchmarks.offload                   # on a machine with a CUDA device
    python -m benchmarks.offload --tiny            # the same, small, on the CPU: no figures
    python -m benchmarks.offload --plan 1xH100     # the largest model alone, planned without a GPU

A step of GPT-2 (forward, backward) that keeps all activations is what others are compared with:
autopar within parts of that peak, torch's min-cut partitioner at some budgets, checkpoints around
every layer, and saved tensors that are copied to the host (`torch.autograd.graph.save_on_cpu`).
Peaks are beyond what is there before the step. All take turns; times are medians.

The largest model is GPT-2 with one width and more and more layers, in float32 with AdamW, whose
plan is within the memory given, parameters on the host and microbatches where they help; on a
device two steps of it are run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import click
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.units import format_bytes, format_ns
from benchmarks.models import gpt2, gpt2_small, tokens
from benchmarks.partitioner import medians
from benchmarks.partitioner import peak_bytes as peak_on_cpu
from benchmarks.tables import tell
from benchmarks.torch_private import memory_budget

PARTS = (0.9, 0.8, 0.67, 0.5)
"""Of the peak of keeping all, within which autopar plans."""

BUDGETS = (0.75, 0.5, 0.25)
"""Of torch's partitioner."""

WIDTH, LAYERS, WORDS, BATCH, SEQUENCE = 2048, (24, 48, 96, 192, 288), 50_257, 4, 1024
"""Of the largest model."""

COLUMNS = ("step", "peak MiB", "memory saved", "ms", "time lost")
LARGEST = (
    "layers",
    "parameters",
    "predicted peak",
    "predicted step",
    "on the host",
    "measured peak",
    "measured step",
)


class Contender(NamedTuple):
    """A step of a model, and what is around its forward."""

    name: str
    run: Callable[[], None]


class Setting(NamedTuple):
    """Where, and how large."""

    device: torch.device
    tiny: bool
    rounds: int

    @property
    def batch(self) -> dict[str, Any]:
        sizes = (256, 4, 64) if self.tiny else (50_257, 8, 1024)
        return tokens(*sizes, str(self.device))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """What a run allocates at most beyond what is there before it."""
        run()
        if self.device.type != "cuda":
            return peak_on_cpu(run)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def stepping(
    model: nn.Module,
    batch: dict[str, Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], None]:
    """Forward inside `around`, and backward, which adds to gradients that are there."""

    def run() -> None:
        model.zero_grad(set_to_none=False)
        with around():
            loss = model(**batch).loss
        loss.backward()
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()

    return run


def autopars(model: nn.Module, setting: Setting, limit_bytes: int) -> Callable[[], None] | None:
    """The step as autopar plans it with so much beside parameters and gradients; None if nothing
    fits."""
    stored = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        planned = autopar.compile(
            deepcopy(model),
            mesh="1",
            optimizer="sgd",
            memory={"limit": stored + limit_bytes},
            backend="eager",
        )
        run = stepping(planned, setting.batch)
        run()
    except InfeasibleError as error:
        click.echo(f"{error}", err=True)
        return None
    return run


def contenders(model: nn.Module, setting: Setting, peak: int) -> Iterator[Contender]:
    """All but the step that keeps all, whose peak is given."""
    batch = setting.batch
    for part in PARTS:
        run = autopars(model, setting, int(part * peak))
        if run is not None:
            yield Contender(f"autopar within {part:.0%}", run)
    for budget in BUDGETS:
        torch.compiler.reset()
        compiled: Any = torch.compile(deepcopy(model), backend="aot_eager_decomp_partition")
        run = stepping(compiled, batch)
        with memory_budget(budget):
            run()
        yield Contender(f"torch's partitioner, budget {budget:g}", run)
    layered: Any = deepcopy(model)
    layered.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield Contender("checkpoints around layers", stepping(layered.train(), batch))
    pinned = setting.device.type == "cuda"
    hooks = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)  # noqa: E731
    yield Contender("saved tensors on the host", stepping(deepcopy(model), batch, hooks))


def curve(setting: Setting) -> list[list[str]]:
    """A row per contender, the first of which keeps all."""
    torch.manual_seed(0)
    model = gpt2(tiny=setting.tiny).to(setting.device)
    keeping = Contender("eager, keeps all", stepping(deepcopy(model), setting.batch))
    most = setting.peak_bytes(keeping.run)
    found = [keeping, *contenders(model, setting, most)]
    peaks = [most, *(setting.peak_bytes(each.run) for each in found[1:])]
    times = medians([each.run for each in found], setting.rounds)
    return [
        [each.name, f"{peak / 2**20:.1f}", f"{1 - peak / most:.0%}", f"{ms:.1f}",
         f"{ms / times[0] - 1:.0%}"]
        for each, peak, ms in zip(found, peaks, times, strict=True)
    ]  # fmt: skip


def largest(
    cluster: str, limit: str, device: torch.device | None, counts: Sequence[int], *, tiny: bool
) -> list[list[str]]:
    """A row per number of layers that fits."""
    rows: list[list[str]] = []
    width = 64 if tiny else WIDTH
    words, batch, sequence = (256, 4, 64) if tiny else (WORDS, BATCH, SEQUENCE)

    def build() -> nn.Module:
        return gpt2_small(
            width=width, layers=layers, heads=max(1, width // 64), words=words, sequence=sequence
        )

    how: dict[str, Any] = {
        "memory": {"limit": limit, "residency": "cpu" if tiny else "auto"}, "mesh": "1",
        "microbatches": "auto", "optimizer": "adamw-fused",
    }  # fmt: skip
    for layers in counts:
        with torch.device("meta"):
            model = build()
        try:
            given = tokens(words, batch, sequence, "meta")
            plan = autopar.plan(model, given, cluster=cluster, **how)
        except InfeasibleError as error:
            click.echo(f"{layers} layers: {error}", err=True)
            break
        found, params = plan.estimates, plan.structure.params.values()
        hosted = sum(param.residency == "cpu" for param in params)
        measured = ("", "")
        if device is not None:
            measured = _trained(build(), plan, device, (words, batch, sequence))
        rows.append([
            str(layers), f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion",
            format_bytes(found.memory.total), format_ns(found.step_ns),
            f"{hosted} of {len(params)}", *measured,
        ])  # fmt: skip
    return rows


def _trained(
    model: nn.Module, plan: autopar.Plan, device: torch.device, sizes: tuple[int, int, int]
) -> tuple[str, str]:
    """The peak and the time of the second of two steps on the device."""
    compiled = autopar.compile(model, plan=plan)
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    given = tokens(*sizes, str(device))
    start_s = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        compiled(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type != "cuda":
        return "ran", ""
    torch.cuda.synchronize()
    taken_s = time.perf_counter() - start_s
    return format_bytes(torch.cuda.max_memory_allocated()), format_ns(round(taken_s * 1e9))


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--tiny", is_flag=True, help="Small, on the CPU.")
@click.option("--plan", "cluster", metavar="CLUSTER", help="Only plan the largest model for it.")
@click.option("--limit", default="6GiB", show_default=True, help="For the largest model.")
@click.option(
    "--layers",
    multiple=True,
    type=click.IntRange(1),
    help="Of the largest model, tried in order until one does not fit.",
)
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(
    tiny: bool,
    cluster: str | None,
    limit: str,
    layers: tuple[int, ...],
    rounds: int,
    as_markdown: bool,
) -> None:
    is_cuda = torch.cuda.is_available() and not tiny
    if not (tiny or cluster or is_cuda):
        raise click.UsageError("no CUDA device: give --tiny, or --plan CLUSTER")
    device = torch.device("cuda" if is_cuda else "cpu")
    if not is_cuda:
        torch.set_num_threads(1)
    layers = layers or ((2, 4) if tiny else LAYERS)
    if cluster is None:
        rows = curve(Setting(device, tiny, rounds))
        _print("Memory saved against time lost, beside keeping all", COLUMNS, rows, as_markdown)
        cluster = "1xcpu" if tiny else None
        found = largest(cluster or autopar_cluster(), limit, device, layers, tiny=tiny)
    else:
        found = largest(cluster, limit, None, layers, tiny=tiny)
    _print(f"The largest model within {limit}", LARGEST, found, as_markdown)


def autopar_cluster() -> str:
    """This device, as autopar calls it."""
    from autopar.runtime.process.world import look

    return look(torch.device("cuda"), "cuda").cluster


def _print(title: str, header: tuple[str, ...], rows: list[list[str]], as_markdown: bool) -> None:
    tell(title, header, rows, as_markdown=as_markdown, width=120)
    if as_markdown:
        click.echo()


if __name__ == "__main__":
    main()
