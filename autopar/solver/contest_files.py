"""Problem files of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

The format is JSON, plain or gzip: `problem.nodes.intervals` ([lower, upper), half open), `.costs`
and `.usages` with an entry per choice, `problem.edges.nodes` and `.costs` (flattened, row by row of
the first node's choices), `problem.usage_limit`. All figures are integers of at least 0 and of any
size. Files are untrusted: every fault is a `ProblemFileError` that says where it is.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np

from autopar.errors import ProblemFileError
from autopar.ir.files import read_at_most
from autopar.ir.problem import FORBIDDEN, Edge, IntArray, Problem, Usage

MAX_BYTES = 1 << 29
"""The largest file, unpacked, that is read. Those of the contest have at most a tenth of that."""

_GZIP = b"\x1f\x8b"
_COST_BITS = 60
_NOT_ALLOWED = 10**12
"""Costs below this are never taken to stand for "not allowed"."""


class _Nodes(msgspec.Struct):
    intervals: list[tuple[int, int]]
    costs: list[list[int]]
    usages: list[list[int]]


class _Edges(msgspec.Struct):
    nodes: list[tuple[int, int]] = []
    costs: list[list[int]] = []


class ContestFile(msgspec.Struct):
    """A problem file that has been read and checked. `usage_limit` is the limit at every time, None
    if there is none."""

    nodes: _Nodes
    edges: _Edges = msgspec.field(default_factory=_Edges)
    usage_limit: int | None = None
    name: str = ""

    def cost(self, choice: Sequence[int]) -> int:
        """The cost of `choice`, in exact arithmetic."""
        nodes, edges = self.nodes, self.edges
        total = sum(costs[c] for costs, c in zip(nodes.costs, choice, strict=True))
        for (a, b), costs in zip(edges.nodes, edges.costs, strict=True):
            total += costs[choice[a] * len(nodes.costs[b]) + choice[b]]
        return total

    def peak(self, choice: Sequence[int]) -> int:
        """The largest sum of usages at any time, in exact arithmetic."""
        nodes = self.nodes
        changes = Counter[int]()
        for (start, stop), usages, c in zip(nodes.intervals, nodes.usages, choice, strict=True):
            if start < stop:
                changes[start] += usages[c]
                changes[stop] -= usages[c]
        return max(accumulate(changes[time] for time in sorted(changes)), default=0)

    def not_allowed_above(self) -> int | None:
        """The cost that stands for "not allowed": the largest one in the file, if every plan
        without it is cheaper than any with it. None if there is no such cost."""
        rows = [*self.nodes.costs, *self.edges.costs]
        largest = max(map(max, rows))
        if largest < _NOT_ALLOWED:
            return None
        rest = sum(max((c for c in row if c < largest), default=0) for row in rows)
        return largest if rest < largest else None

    def state(self, *, forbid: bool) -> Stated:
        """The problem for the solver. With `forbid`, the cost `not_allowed_above()` is forbidden;
        else it is a cost like others. Costs are rounded as far as needed to fit."""
        nodes, edges = self.nodes, self.edges
        wall = self.not_allowed_above() if forbid else None
        rows = [*nodes.costs, *edges.costs]
        total = sum(max((c for c in row if wall is None or c < wall), default=0) for row in rows)
        shift = max(0, total.bit_length() - _COST_BITS)
        usages, limit, rounded = self._usages()
        counts = [len(costs) for costs in nodes.costs]
        times = sorted({time for span in nodes.intervals for time in span})
        # Only the order of times matters; where they do not fit, their ranks stand for them.
        fits = times[-1] < FORBIDDEN
        place = {time: time if fits else at for at, time in enumerate(times)}
        problem = Problem(
            name=self.name or "contest",
            keys=tuple(f"n{i:07d}" for i in range(len(counts))),
            labels=tuple(tuple(map(str, range(count))) for count in counts),
            costs=tuple(_costs(costs, wall, shift) for costs in nodes.costs),
            usages=tuple(
                (Usage(place[start], place[stop], amounts),)
                for (start, stop), amounts in zip(nodes.intervals, usages, strict=True)
            ),
            edges=tuple(
                Edge(a, b, _costs(costs, wall, shift).reshape(counts[a], counts[b]))
                for (a, b), costs in zip(edges.nodes, edges.costs, strict=True)
            ),
            usage_limit=limit,
        )
        return Stated(problem, shift, bounded=not rounded)

    def _usages(self) -> tuple[tuple[IntArray, ...], int | None, bool]:
        """Usages, limit, and whether they are rounded: no sum of them exceeds 64 bits. Single
        usages above the limit are cut to just above it. If that is not enough, all usages are
        rounded up, and the limit down."""
        nodes, limit = self.nodes, self.usage_limit
        most = sum(map(max, nodes.usages))
        if limit is None or most <= limit:
            return tuple(np.zeros(len(u), dtype=np.int64) for u in nodes.usages), None, False
        capped = (limit + 1) * max(1, len(nodes.usages))
        if most.bit_length() <= _COST_BITS:
            return tuple(np.array(u, dtype=np.int64) for u in nodes.usages), limit, False
        shift = max(0, capped.bit_length() - _COST_BITS)
        usages = tuple(
            np.array([-((-min(x, limit + 1)) >> shift) for x in u], dtype=np.int64)
            for u in nodes.usages
        )
        return usages, limit >> shift, shift > 0


class _File(msgspec.Struct):
    problem: ContestFile


@dataclass(frozen=True, slots=True)
class Stated:
    """A problem for the solver, whose costs are those of the file shifted right by `shift` bits.
    `bounded` is false if usages were rounded up."""

    problem: Problem
    shift: int
    bounded: bool

    def lower_bound(self, bound: int) -> int:
        """The lower bound for the file, from one for `problem`."""
        return bound << self.shift if self.bounded else 0


def load(path: Path) -> ContestFile:
    """Reads and checks the file at `path`. ProblemFileError if anything is wrong with it."""
    try:
        stated = msgspec.json.decode(_unpacked(path), type=_File).problem
    except msgspec.ValidationError as error:
        raise ProblemFileError(f"{path} is not a contest problem: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProblemFileError(f"{path} is not valid JSON: {error}") from None
    try:
        _check(stated)
    except ValueError as error:
        raise ProblemFileError(f"{path} is not a contest problem: {error}") from None
    return stated


def _unpacked(path: Path) -> bytes:
    try:
        packed = read_at_most(path, MAX_BYTES + 1)
        content = _unzipped(packed) if packed.startswith(_GZIP) else packed
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ProblemFileError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise ProblemFileError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ProblemFileError(
            f"{path} holds more than {MAX_BYTES >> 20} MiB, which is more than autopar reads"
        )
    return content


def _unzipped(packed: bytes) -> bytes:
    """At most a byte more than `MAX_BYTES` of what `packed` holds."""
    with gzip.GzipFile(fileobj=BytesIO(packed)) as file:
        return file.read(MAX_BYTES + 1)


def _check(stated: ContestFile) -> None:
    """ValueError on lists that do not fit together and on figures out of range."""
    nodes, edges = stated.nodes, stated.edges
    count = len(nodes.costs)
    if not count:
        raise ValueError("it has no nodes")
    if len(nodes.usages) != count or len(nodes.intervals) != count:
        raise ValueError(
            f"it has costs of {count} nodes, usages of {len(nodes.usages)} and intervals of "
            f"{len(nodes.intervals)}"
        )
    for i, (costs, usages) in enumerate(zip(nodes.costs, nodes.usages, strict=True)):
        if not costs:
            raise ValueError(f"node {i} has no choices")
        if len(costs) != len(usages):
            raise ValueError(f"node {i} has {len(costs)} costs and {len(usages)} usages")
        if min(costs) < 0 or min(usages) < 0:
            raise ValueError(f"node {i} has a cost or usage below 0")
    for i, (start, stop) in enumerate(nodes.intervals):
        if not 0 <= start <= stop:
            raise ValueError(f"node {i} has the interval [{start}, {stop})")
    if len(edges.nodes) != len(edges.costs):
        raise ValueError(f"it has {len(edges.nodes)} edges and costs of {len(edges.costs)}")
    for e, ((a, b), costs) in enumerate(zip(edges.nodes, edges.costs, strict=True)):
        if not (0 <= a < count and 0 <= b < count):
            raise ValueError(f"edge {e} names nodes {a} and {b}, and there are {count}")
        size = len(nodes.costs[a]) * len(nodes.costs[b])
        if len(costs) != size:
            raise ValueError(f"edge {e} has {len(costs)} costs for {size} pairs of choices")
        if min(costs) < 0:
            raise ValueError(f"edge {e} has a cost below 0")
    if stated.usage_limit is not None and stated.usage_limit < 0:
        raise ValueError(f"its usage_limit is {stated.usage_limit}")


def _costs(costs: list[int], wall: int | None, shift: int) -> IntArray:
    if shift:
        costs = [FORBIDDEN if wall is not None and c >= wall else c >> shift for c in costs]
    elif wall is not None:
        costs = [FORBIDDEN if c >= wall else c for c in costs]
    return np.array(costs, dtype=np.int64)
