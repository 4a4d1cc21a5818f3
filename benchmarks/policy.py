"""What each threshold of the search is good for: halved and doubled, with the predicted step and
the CPU seconds of cases that read it, beside those with the thresholds as they are.

    python -m benchmarks.policy
    python -m benchmarks.policy --threshold chunks_worth --markdown

A case is a small language model on a cluster. A threshold is tried on the cases whose search reads
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from autopar.plans.requests.policy import Policy
from benchmarks.tables import tell

if TYPE_CHECKING:
    from autopar.ir.graph import Graph

TITLE = "Predicted step and CPU seconds, as ratios to those with the thresholds as they are"
HEADER = ("threshold", "is", "tried", "case", "step", "CPU")
CASES: Mapping[str, tuple[int, int, str, int, dict[str, Any]]] = {
    "8x8 H100": (4096, 4, "8x8xH100", 256, {"search": {"margin": True}}),
    "4 L4, tight": (1024, 2, "4xL4", 256, {"microbatches": 1, "memory": {"limit": "6GiB"}}),
    "4 stages on 2x4 A100": (2048, 16, "2x4xA100", 64, {"pipeline": {"stages": 4}}),
    "6x1 L4, unsaid": (2048, 6, "6x1xL4", 12, {}),
    "3 stages on 6 A100": (2048, 8, "6xA100", 64, {"pipeline": {"stages": 3}}),
    "2 L4, host": (2048, 8, "2xL4", 32, {"memory": {"residency": "auto", "limit": "4GiB"}}),
}
"""Width, layers, cluster, sequences of 512 tokens, and options."""


@dataclass(frozen=True)
class Ran:
    """A search: its CPU seconds, the predicted step, and which thresholds it read."""

    cpu_s: float
    step_ns: int
    read: tuple[str, ...]


class _Watched(Policy, frozen=True):
    """A policy that keeps which of its thresholds are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in Policy.__struct_fields__:
            _READ.add(name)
        return super().__getattribute__(name)


_READ = set[str]()


def measure(case: str, changed: Mapping[str, Any]) -> Ran:
    """Plan a case, with some thresholds changed."""
    from autopar.cluster.parsing import parse_cluster
    from autopar.driver.planning import answer
    from autopar.plans.requests.read_options import make_options
    from autopar.plans.requests.request import make_graph_request

    *_, cluster, _, given = CASES[case]
    _READ.clear()
    options = replace(make_options(backend="eager", **given), policy=_Watched(**changed))
    asked = make_graph_request(_graph(case), parse_cluster(cluster), options)
    start_s = time.process_time()
    plan = answer(asked, lambda _: None)
    taken_s = time.process_time() - start_s
    return Ran(taken_s, plan.estimates.step_ns, tuple(sorted(_READ)))


@cache
def _graph(case: str) -> Graph:
    import torch

    from autopar.tracer import trace
    from benchmarks.models import feed_forward

    width, layers, _, batch, _ = CASES[case]
    with torch.device("meta"):
        ids = torch.zeros(batch, 512, dtype=torch.long)
        return trace(feed_forward(width, layers, 32_000), (ids, ids), {}).graph


def tried(name: str) -> Iterator[float]:
    """Half of a threshold and twice that, as whole as it is; of a factor, what is beyond 1."""
    usual = getattr(Policy(), name)
    for times in (0.5, 2.0):
        value = 1 + times * (usual - 1) if name in _FACTORS else times * usual
        yield max(1, round(value)) if isinstance(usual, int) else value


_FACTORS = ("estimate_near", "estimate_slack", "fewer_microbatches_gain")


def rows(cases: tuple[str, ...], names: tuple[str, ...]) -> Iterator[list[str]]:
    """Each threshold with each value on each case, in the order of `HEADER`."""
    for case in cases:
        measure(case, {})
        before = measure(case, {})
        for name in (each for each in names if each in before.read):
            for value in tried(name):
                found = measure(case, {name: value})
                yield [
                    *(name, f"{getattr(Policy(), name):g}", f"{value:g}", case),
                    f"{found.step_ns / before.step_ns:.4f}",
                    f"{found.cpu_s / before.cpu_s:.2f}",
                ]


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice([*CASES]))
@click.option("--threshold", "names", multiple=True, type=click.Choice(Policy.__struct_fields__))
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def main(cases: tuple[str, ...], names: tuple[str, ...], *, markdown: bool) -> None:
    """Halve and double the thresholds of the search."""
    found: list[list[str]] = []
    for line in rows(cases or tuple(CASES), names or Policy.__struct_fields__):
        click.echo(": ".join(line), err=True)
        found.append(line)
    order = {name: place for place, name in enumerate(Policy.__struct_fields__)}
    found.sort(key=lambda row: (order[row[0]], float(row[2])))
    tell(TITLE, HEADER, found, as_markdown=markdown)


if __name__ == "__main__":
    main()
