"""Plan time of models whose layers do not repeat, from the model to its plan: CPU seconds by phase
and their target, with datasheet figures of H100s, on all meshes. A process each.

    python -m benchmarks.irregular                          # those with a target
    python -m benchmarks.irregular --model widening --layers 300 --cluster 8x8xH100
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click
import torch
from torch import Tensor, nn

from benchmarks.plan_time import ROOT, Phases
from benchmarks.tables import markdown

if TYPE_CHECKING:
    from autopar.ir.graph import Graph
    from autopar.tracer import Traced

SHOWN = ("trace", "price", "solve", "plan")
HEADER = ("model", "layers", "cluster", *SHOWN, "total", "nodes", "proof")


class Widening(nn.Module):
    """Linear layers, each wider than the one before: nothing is equal."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 + i, 65 + i) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Named(nn.Module):
    """Equal linear layers under names that no numbers tell apart."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            self.add_module("layer_" + "".join(chr(97 + int(d)) for d in str(i)), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return x.square().mean()


class Fan(nn.Module):
    """Heads of different widths on one tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64 + i) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x).square().mean() for head in self.heads]).sum()


class Recurrent(nn.Module):
    """An LSTM cell, unrolled: its weights are used in every step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cell, self.count = nn.LSTMCell(64, 64), count

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(self.count):
            h, c = self.cell(x, (h, c))
        return h.square().mean()


class UNet(nn.Module):
    """Convolutions to ever more channels and back, halved and doubled in size on the way, each way
    back with what the way there made: no two are equal."""

    def __init__(self, count: int) -> None:
        super().__init__()
        ways = [(64 + i, 65 + i) for i in range(count // 2)]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ways)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(ways))
        self.every = max(1, count // 8)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, layer in enumerate(self.down, 1):
            x = torch.relu(layer(x))
            kept.append(x)
            if i % self.every == 0:
                x = nn.functional.max_pool2d(x, 2)
        for layer in self.up:
            skipped = kept.pop()
            if x.shape[-1] != skipped.shape[-1]:
                x = nn.functional.interpolate(x, scale_factor=2.0)
            x = torch.relu(layer(torch.cat([x, skipped], 1)))
        return x.square().mean()


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "widening": Widening, "named": Named, "fan": Fan, "recurrent": Recurrent,
    "unet": UNet,
}  # fmt: skip

SHAPES = {"unet": (64, 64, 64, 64)}
"""What models are handed that take no 64 rows of 64 features."""

TARGETS = {"widening": 1000, "unet": 300, "recurrent": 512}
"""How many layers, or steps, are to be planned within 20 CPU seconds."""

FEW = 300


def measure(model: str, layers: int, cluster: str) -> list[str]:
    """A row of the table, from this process."""
    import autopar
    from autopar.tracer import trace

    phases = Phases()
    with torch.device("meta"):
        made, given = MODELS[model](layers), torch.empty(SHAPES.get(model, (64, 64)))
        # What torch imports when it traces for the first time is no part of it.
        trace(nn.Linear(64, 1), (torch.empty(64, 64),))
    seen: list[Graph] = []

    def traced(*args: Any, **options: Any) -> Traced:
        found = trace(*args, **options)
        seen.append(found.graph)
        return found

    flow = import_module("autopar.compile")
    parts = {"trace": traced, "price": flow.price, "solve": flow.solve}
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(patch.object(flow, name, phases.timed(name, part)))
        found = phases.timed("plan", autopar.plan)(
            made,
            given,
            cluster=cluster,
            progress=lambda text: click.echo(f"{time.process_time():.0f} s: {text}", err=True),
        )
    known = found.provenance
    proof = known.status if known.status == "optimal" else f"gap {known.gap_ppm / 1e4:.2g} %"
    seconds = [phases.cpu_s[phase] for phase in SHOWN]
    figures = [f"{each:.1f}" for each in (*seconds, sum(seconds))]
    return [model, f"{layers:,}", cluster, *figures, f"{len(seen[0].nodes):,}", proof]


@click.command(help=__doc__)
@click.option("--model", type=click.Choice([*MODELS]), help="Default: those with a target.")
@click.option("--layers", type=click.IntRange(1), help="Or steps; default: that of the target.")
@click.option("--cluster", default="8xH100", show_default=True)
@click.option("--worker", is_flag=True, hidden=True)
def main(model: str | None, layers: int | None, cluster: str, worker: bool) -> None:
    asked = [model] if model else [*TARGETS]
    counts = {each: layers or TARGETS.get(each, FEW) for each in asked}
    if worker:
        rows = [measure(each, count, cluster) for each, count in counts.items()]
        click.echo(markdown(HEADER, rows).splitlines()[-1])
        return
    click.echo(markdown(HEADER, []))
    for each, count in counts.items():
        subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.irregular", "--worker"),
                *("--model", each, "--layers", str(count), "--cluster", cluster),
            ],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            check=True,
        )


if __name__ == "__main__":
    main()
