"""Collectives and kernels as others measured them, and what the prices say of each.

    python -m benchmarks.operators                 # median and 90th percentile of the error
    python -m benchmarks.operators --markdown
    python -m benchmarks.operators --worst 20      # the points that are furthest off

`benchmarks/data/operators.csv` has the points: a sample, evenly spread over the work, of what
published sweeps measured, each with its source. The constants of the presets were fitted to most of
these sweeps (`cluster/links.py`, `cluster/kernels.py` say to which), never to a training run.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import numpy as np

from autopar.cluster.devices import DEVICES
from autopar.cluster.kernels import SUSTAINED
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.roofline import attention_s, matmul_s, stream_s
from autopar.ir.graph import itemsize
from autopar.ir.mesh import Device
from autopar.rules.op import Scores
from benchmarks.tables import markdown, show

DATA = Path(__file__).parent / "data" / "operators.csv"
HEADER = ("family", "device", "points", "median", "90th percentile", "median, signed")


class Point(msgspec.Struct, frozen=True):
    """`us` microseconds were measured for `what`: words, and figures as `name=1`."""

    family: str
    device: str
    what: str
    us: float
    source: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for word in self.what.split() if "=" not in word)

    @property
    def figures(self) -> Mapping[str, int]:
        pairs = (word.split("=") for word in self.what.split() if "=" in word)
        return {name: int(figure) for name, figure in pairs}


def read(path: Path = DATA) -> tuple[Point, ...]:
    """The points of the table, as they stand there."""
    with path.open(newline="", encoding="utf-8") as lines:
        return tuple(msgspec.convert(row, Point, strict=False) for row in csv.DictReader(lines))


def predicted_us(point: Point) -> float:
    """What the prices say of `point`. ValueError if it is of no known family."""
    device = DEVICES[point.device]
    match point.family:
        case "product":
            return 1e6 * _product_s(point, device)
        case "attention":
            return 1e6 * _attention_s(point, device)
        case "stream":
            return 1e6 * _stream_s(point, device)
        case "collective":
            return 1e6 * _collective_s(point)
        case family:
            raise ValueError(f"points of {family!r} are not known")


def _product_s(point: Point, device: Device) -> float:
    (dtype,), of = point.words, point.figures
    m, k, n = of["m"], of["k"], of["n"]
    # What float8 makes is written in two bytes.
    moved = itemsize(dtype) * (m * k + k * n) + max(2, itemsize(dtype)) * m * n
    # Sweeps are over before the clock falls.
    its = device.kernels
    boosted = replace(its, matmul=its.matmul / SUSTAINED.get(device.name, 1.0))
    return matmul_s(m * n, k, moved, dtype, replace(device, kernels=boosted))


def _attention_s(point: Point, device: Device) -> float:
    (mask, direction, *dtypes), of = point.words, point.figures
    causal, backward = mask == "causal", direction == "backward"
    rows, length, width = of["batch"] * of["heads"] * of["length"], of["length"], of["head_dim"]
    scores = Scores(
        rows, length, width, 10.0 if backward else 4.0, causal, backward, added=mask == "masked"
    )
    flops = scores.per_score * rows * length * width * (0.5 if causal else 1.0)
    (dtype,) = dtypes or ("bfloat16",)
    moved = (8 if backward else 4) * itemsize(dtype) * rows * width
    return attention_s(flops, scores, moved, dtype, device)


def _stream_s(point: Point, device: Device) -> float:
    kernels, (kind, direction, *_) = device.kernels, point.words
    part = kernels.reduction_backward if direction == "backward" else kernels.reduction
    part = kernels.pointwise if kind == "pointwise" else part
    return kernels.start_s + stream_s(point.figures["bytes"], device, part)


def _collective_s(point: Point) -> float:
    (kind,), of = point.words, point.figures
    ranks, nodes, whole = of["ranks"], of["nodes"], of["bytes"]
    sizes = f"{nodes}x{ranks // nodes}" if nodes > 1 else f"{ranks}"
    (axis,) = parse_mesh(str(ranks), parse_cluster(f"{sizes}x{point.device}")).axes
    given = whole // ranks if kind == "all_gather" else whole
    brought = whole // ranks if kind == "reduce_scatter" else whole
    return float(collective_s(kind, given, brought, axis))


def scores(points: Iterable[Point]) -> dict[tuple[str, str], np.ndarray]:
    """predicted / measured - 1 of the points of each family and device, in the table's order."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for point in points:
        where = "several nodes" if point.figures.get("nodes", 1) > 1 else ""
        others = [w for w in point.words if w.startswith(("float32", "float8", "masked"))]
        kind = " ".join(filter(None, (point.device, where, *others)))
        found[point.family, kind].append(predicted_us(point) / point.us - 1)
    return {kind: np.array(errors) for kind, errors in found.items()}


def table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """The lines of the table."""
    return [
        (
            *kind,
            str(len(errors)),
            f"{100 * np.median(np.abs(errors)):.0f} %",
            f"{100 * np.quantile(np.abs(errors), 0.9):.0f} %",
            f"{100 * np.median(errors):+.0f} %",
        )
        for kind, errors in scores(points).items()
    ]


@click.command(help=__doc__)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worst", type=click.IntRange(1), help="The points that are furthest off.")
def main(as_markdown: bool, worst: int | None) -> None:
    """Print the table."""
    points = read()
    if worst:
        ratios = [(predicted_us(point) / point.us, point) for point in points]
        ratios.sort(key=lambda found: -abs(np.log(found[0])))
        for ratio, point in ratios[:worst]:
            click.echo(f"{ratio:6.2f}  {point.family}, {point.device}: {point.what}, {point.us} us")
    elif as_markdown:
        click.echo(markdown(HEADER, table(points)))
    else:
        show("Prices beside measurements", HEADER, table(points), 100)


if __name__ == "__main__":
    main()
