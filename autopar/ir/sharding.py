"""How a tensor lies on a mesh: one placement per mesh axis.

A dim of a tensor is a product of *atoms* (`graph.Atom`), outermost first; the atoms of a dim are
its *parts*. `S(2)` shards the first (outermost) part of dim 2, `S(2.1)` the second one: a hidden
dim of 32 heads times 128 has parts (32, 128), and `S(2.1)` gives each rank a slice of every head.
A dim with one part has only `S(2)`, DTensor's `Shard(2)`. Both divide without a rest; `C(2)` cuts
dim 2, whatever its parts, into chunks that need not be equal (`uneven`). Parameters are stored
so, and nothing is computed so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

_SHARD = re.compile(r"^S\((\d+)(?:\.(\d+))?\)$")
_CHUNK = re.compile(r"^C\((\d+)\)$")


class Placement(NamedTuple):
    """`R` replicated, `S(dim.part)` sharded, `C(dim)` cut into chunks, `P` partial (the whole is
    the sum over the axis)."""

    kind: Literal["R", "S", "C", "P"]
    dim: int = -1
    part: int = 0

    def __str__(self) -> str:
        if self.kind in "RP":
            return self.kind
        return f"{self.kind}({self.dim}.{self.part})" if self.part else f"{self.kind}({self.dim})"

    @staticmethod
    def parse(text: str) -> Placement:
        """The inverse of `str`; ValueError on anything else."""
        if text in ("R", "P"):
            return R if text == "R" else P
        match = _CHUNK.match(text)
        if match is not None:
            return C(int(match[1]))
        match = _SHARD.match(text)
        if match is None:
            raise ValueError(f"not a placement: {text!r} (R, P, S(dim), S(dim.part) or C(dim))")
        return S(int(match[1]), int(match[2] or 0))

    @property
    def slot(self) -> tuple[int, int]:
        """(dim, part) of a shard."""
        return self.dim, self.part


R = Placement("R")
P = Placement("P")


@lru_cache(1 << 10)
def S(dim: int, part: int = 0) -> Placement:
    """Sharded on part `part` of dim `dim`."""
    return Placement("S", dim, part)


def C(dim: int) -> Placement:
    """Cut into chunks of dim `dim`, which may be uneven."""
    return Placement("C", dim)


class Sharding(tuple[Placement, ...]):
    """One placement per mesh axis, in mesh order."""

    # A tuple itself, as pricing hashes and compares millions of them.
    __slots__ = ()

    def __bool__(self) -> bool:
        """Always: on a mesh without axes it is empty, and a sharding like others."""
        return True

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self)) + "]"

    @staticmethod
    @lru_cache(1 << 12)
    def parse(text: str) -> Sharding:
        """The inverse of `str`; ValueError on anything else."""
        if not (text.startswith("[") and text.endswith("]")):
            raise ValueError(f"not a sharding: {text!r} (for example [S(0), R])")
        inner = text[1:-1]
        return (
            Sharding(tuple(Placement.parse(p.strip()) for p in inner.split(",")))
            if inner
            else Sharding(())
        )

    @staticmethod
    def replicated(num_axes: int) -> Sharding:
        """`R` on every axis."""
        return Sharding((R,) * num_axes)

    @property
    def is_replicated(self) -> bool:
        return all(p == R for p in self)

    @property
    def has_partial(self) -> bool:
        return any(p == P for p in self)

    def with_axis(self, axis: int, placement: Placement) -> Sharding:
        """The same, but for one axis."""
        return Sharding((*self[:axis], placement, *self[axis + 1 :]))

    def axes_on(self, slot: tuple[int, int]) -> tuple[int, ...]:
        """The mesh axes, ascending, that shard part `slot` = (dim, part)."""
        return tuple(k for k, p in enumerate(self) if p.kind == "S" and p.slot == slot)


@dataclass(frozen=True, slots=True)
class InputSharding:
    """Which shard of an input each rank is passed: `sharding` over all ranks in a grid of `sizes`,
    row-major, slowest axis first. `[S(0)] on 4`: each of four ranks has a quarter of dim 0."""

    sharding: Sharding
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.sharding} on {'x'.join(map(str, self.sizes))}"
