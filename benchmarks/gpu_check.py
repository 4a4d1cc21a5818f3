"""autopar on one GPU: are its gradients eager's, and what does a step take beside eager and
torch.compile? Then a profile of the device.

    python -m benchmarks.gpu_check              # on a machine with a CUDA device
    python -m benchmarks.gpu_check --tiny       # the same, small, on the CPU: seconds, no figures

Gradients are compared in float32, from the same random numbers. Steps (forward, backward, AdamW)
are timed in bfloat16, in turns, so that a change of the clock meets all alike; the figures are
medians. Peak memory is what is held between steps (parameters, buffers, optimizer states) and what
a step takes on top of it.

Written to `--out`, `benchmarks/data` unless `--tiny`: `gpu_check_DEVICE.json` and `.md`, after each
model, and `profile_DEVICE.json`. The status is 1 if autopar failed or a gradient differs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import nn

import autopar
from autopar.cluster.profile import Profile
from benchmarks.gpu_report import HEADER, Case, Results, Variant, notes, rows, slug, write
from benchmarks.models import gpt2, llama_block, tokens
from benchmarks.tables import show

DATA = Path(__file__).resolve().parent / "data"
PARTS = ("gpt2", "dropout", "llama", "profile")


@dataclass(frozen=True)
class Model:
    """What to run: a constructor, and the shape of a batch."""

    name: str
    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    sequence: int


@dataclass(frozen=True)
class Setting:
    """Where and how to run."""

    device: torch.device
    tiny: bool
    repeats: int

    @property
    def cluster(self) -> str | None:
        """The CPU, also where there is a GPU; else the device at hand."""
        return "1xcpu" if self.device.type == "cpu" else None

    @property
    def backend(self) -> str:
        """autopar's."""
        return "eager" if self.device.type == "cpu" else "inductor"

    @property
    def dtype(self) -> torch.dtype:
        """What steps are timed in."""
        return torch.float32 if self.tiny else torch.bfloat16

    def inputs(self, model: Model) -> dict[str, Any]:
        return tokens(model.vocabulary, model.batch, model.sequence, str(self.device))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def models(*, tiny: bool) -> dict[str, Model]:
    """GPT-2, without dropout and with, and one layer of Llama-8B."""
    words, length = 256 if tiny else 50_257, 32 if tiny else 1024
    return {
        "gpt2": Model("GPT-2", lambda: gpt2(tiny=tiny), words, 8, length),
        "dropout": Model(
            "GPT-2, dropout 0.1", lambda: gpt2(tiny=tiny, dropout=0.1), words, 8, length
        ),
        "llama": Model(
            "Llama block",
            lambda: llama_block(tiny=tiny),
            256 if tiny else 32_000,
            4,
            32 if tiny else 2048,
        ),
    }


def check(model: Model, setting: Setting) -> Case:
    """Gradients, then the times of all variants."""
    parameters = sum(param.numel() for param in model.build().parameters())
    loss_error, gradient_error, worst, error = None, None, "", ""
    try:
        loss_error, gradient_error, worst = compare(model, setting)
    except Exception as failure:
        error = _sentence(failure)
    _clean()
    variants = measure(model, setting)
    _clean()
    return Case(
        model=model.name,
        parameters=parameters,
        batch=model.batch,
        sequence=model.sequence,
        dtype=str(setting.dtype).removeprefix("torch."),
        loss_error=loss_error,
        gradient_error=gradient_error,
        worst_gradient=worst,
        variants=variants,
        error=error,
    )


def compare(model: Model, setting: Setting) -> tuple[float, float, str]:
    """Differences of the loss and of the worst gradient from eager's, in float32, and its name."""
    torch.manual_seed(0)
    eager = model.build().to(setting.device)
    compiled = autopar.compile(
        deepcopy(eager), cluster=setting.cluster, backend=setting.backend, mesh="auto"
    )
    inputs = setting.inputs(model)
    losses: list[float] = []
    for module in (eager, compiled):
        torch.manual_seed(1)
        loss = module(**inputs).loss
        loss.backward()
        losses.append(loss.item())
    worst_error, worst = 0.0, ""
    theirs = dict(compiled.named_parameters())
    for name, param in eager.named_parameters():
        error = difference(theirs[name].grad, param.grad)
        if error > worst_error:
            worst_error, worst = error, name
    loss_error = difference(torch.tensor(losses[1]), torch.tensor(losses[0]))
    return loss_error, worst_error, worst


def difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """The largest difference over the largest element; infinite if it is not a number, or if only
    one has a gradient."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    scale = theirs.abs().max().item()
    largest = (ours - theirs).abs().max().item()
    if not isfinite(largest):
        return float("inf")
    return largest / scale if scale else float("inf") if largest else 0.0


@dataclass
class Run:
    """A variant while it is measured."""

    name: str
    backend: str
    module: Any
    params: list[nn.Parameter]
    setting: Setting
    inputs: dict[str, Any]
    times_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    peak_bytes: int | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4)

    def step(self) -> float:
        """Seconds of one step, the device waited for before and after."""
        self.setting.synchronize()
        start_s = time.perf_counter()
        self.module(**self.inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.setting.synchronize()
        return time.perf_counter() - start_s

    def warm_up(self) -> None:
        """The first step, which compiles, and two more; then one whose peak memory is taken."""
        self.first_s = self.step()
        self.step()
        self.step()
        if self.setting.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.peak_bytes = self._held_bytes() + torch.cuda.max_memory_allocated() - before

    def _held_bytes(self) -> int:
        """Other variants lie on the device too: only what is this one's counts."""
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.device.type == "cuda"
        ]
        held = {t.untyped_storage().data_ptr(): t for t in (*self.params, *states)}
        return sum(tensor.untyped_storage().nbytes() for tensor in held.values())

    def result(self) -> Variant:
        plans = getattr(self.module, "plans", ()) if self.name == "autopar" else ()
        return Variant(
            name=self.name,
            backend=self.backend,
            first_s=self.first_s,
            steps_s=tuple(self.times_s),
            peak_bytes=self.peak_bytes,
            predicted_step_s=plans[0].estimates.step_ns / 1e9 if plans else None,
            predicted_peak_bytes=plans[0].estimates.memory.total if plans else None,
            error=self.error,
        )


def measure(model: Model, setting: Setting) -> tuple[Variant, ...]:
    """Times of all variants, in turns."""
    torch.manual_seed(0)
    original = model.build().to(setting.device, setting.dtype)
    torch_backend = "eager" if setting.tiny else "inductor"
    makers: tuple[tuple[str, str, Callable[[nn.Module], Any]], ...] = (
        ("eager", "eager", lambda module: module),
        (
            "torch.compile",
            torch_backend,
            lambda module: torch.compile(module, backend=torch_backend),
        ),
        (
            "autopar",
            setting.backend,
            lambda module: autopar.compile(
                module, cluster=setting.cluster, backend=setting.backend, mesh="auto"
            ),
        ),
    )
    runs: list[Run] = []
    for name, backend, make in makers:
        module, inputs = deepcopy(original), setting.inputs(model)
        run = Run(name, backend, module, list(module.parameters()), setting, inputs)
        runs.append(run)
        try:
            run.module = make(module)
            run.warm_up()
        except Exception as failure:
            run.error = _sentence(failure)
            run.module = None
    for _ in range(setting.repeats):
        for run in runs:
            if not run.error:
                run.times_s.append(run.step())
    torch.compiler.reset()
    return tuple(run.result() for run in runs)


def _sentence(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@click.command(help=__doc__)
@click.option("--tiny", is_flag=True, help="Small models on the CPU.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS)
@click.option("--repeats", type=click.IntRange(1), help="Timed steps of each variant.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder.")
def main(tiny: bool, parts: tuple[str, ...], repeats: int | None, out: Path | None) -> None:
    if not tiny and not torch.cuda.is_available():
        click.echo("gpu_check: skipped, no CUDA device here; --tiny runs it in small on the CPU")
        return
    out = out or (None if tiny else DATA)
    device = torch.device("cpu" if tiny else "cuda")
    setting = Setting(device, tiny, repeats or (3 if tiny else 30))
    name = "cpu" if tiny else torch.cuda.get_device_name()
    results = Results(name, autopar.__version__, str(torch.__version__), ())
    for key, model in models(tiny=tiny).items():
        if key in parts:
            click.echo(f"{model.name}: gradients, then steps", err=True)
            results = msgspec.structs.replace(
                results, cases=(*results.cases, check(model, setting))
            )
            write(results, out)
    if results.cases:
        show(f"{name}: step time over eager's and torch.compile's", HEADER, rows(results), 100)
        click.echo("\n".join(notes(results)))
    if "profile" in parts:
        profile(device, tiny, out, slug(name))
    sys.exit(not all(case.fine for case in results.cases))


def profile(device: torch.device, tiny: bool, out: Path | None, name: str) -> None:
    """Measure the device, and write the profile file."""
    found: Profile = autopar.profile(device, quick=tiny)
    for gap in found.left_out:
        click.echo(f"profile: left out: {gap.entry}: {gap.reason}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.save(out / f"profile_{name}.json")
        click.echo(f"written to {out}", err=True)


if __name__ == "__main__":
    main()
