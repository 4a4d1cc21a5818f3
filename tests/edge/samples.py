"""What is tried on tensors in shards: torch's op database, and what scripts do beside ops, a case
for each sample and place.

A *place* is an argument of an op that is a tensor, or a list of them. In a case the tensors of one
place are in shards, and the others plain, or those of all places are.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.torch_private import TreeSpec, flatten, flatten_with_paths
from tests.edge.methods import methods
from tests.edge.torch_private import database, full_name

DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
"""Of those that an op takes, its samples are of the first."""

KINDS = ("output", "parameter", "gradient", "elsewhere")
"""What is in shards: an output; a parameter; a gradient or a state of an optimizer; a parameter of
a stage on the last rank alone."""

ALL = "all"
_ALL_WAYS = 3
"""So many samples of an op are tried with each kind, cut by each of their dims; the others with one
kind after the other, by one dim."""


def tried_ops() -> list[Any]:
    """The ops of the database, then what is none of them, each in order of names."""
    return [*database(), *methods()]


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of a call, flattened; `places` has the name of the place of each tensor, by its
    number among the leaves."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    places: dict[int, str]


@dataclass(frozen=True, slots=True)
class Case:
    """The call of an op in a `form` on sample `number`, in which the tensors of `place` are of a
    `kind`, cut by `dim` (modulo what they have)."""

    op: str
    number: int
    form: str
    place: str
    kind: str
    dim: int
    sample: Sample
    call: Callable[..., Any]

    @property
    def cut(self) -> frozenset[int]:
        """The leaves that are in shards."""
        return frozenset(k for k, p in self.sample.places.items() if self.place in (p, ALL))

    def __str__(self) -> str:
        what = f"{self.form} of sample {self.number}, {self.kind} cut by {self.dim}"
        return f"{self.op}({self.place}), {what}"


def seed(number: int) -> None:
    """All of a rank's random numbers start from here."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what samples of the database draw from
    torch.manual_seed(number)


def samples(op: Any) -> Iterator[Sample]:
    """Equal on all ranks."""
    dtype = next((dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed(0)
    for each in op.sample_inputs("cpu", dtype, requires_grad=differentiable):
        given = (each.input, each.args, each.kwargs)
        leaves, spec = flatten(given)
        places = {
            number: _place(path)
            for number, (path, leaf) in enumerate(flatten_with_paths(given))
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided
        }
        yield Sample(tuple(leaves), spec, places)


def _place(path: Sequence[Any]) -> str:
    """`0`, `1`, ... by position, or the keyword; a list is one place."""
    first, *rest = path
    if first.idx == 0:
        return "0"
    return str(1 + rest[0].idx) if first.idx == 1 else str(rest[0].key)


def cases(op: Any, most: int | None = None) -> Iterator[Case]:
    """Those of an op, with `most` of its samples, spread evenly."""
    calls: dict[str, Callable[..., Any]] = {"function": op.op}
    if op.inplace_variant is not None:
        calls["in place"] = op.inplace_variant
    if op.supports_out:
        calls["out"] = op.op
        calls["beside out"] = op.op
    with warnings.catch_warnings():  # torch's database calls what torch deprecates
        warnings.simplefilter("ignore")
        found = list(samples(op))
    step = 1 if most is None else max(1, len(found) // most)
    microbatch = 0
    for number, sample in enumerate(found[::step]):
        places = sorted(set(sample.places.values()))
        for place in [*places, ALL] if len(places) > 1 else places:
            dims = max(x.dim() for x in (sample.leaves[k] for k in sample.places))
            for form, call in calls.items():
                if form in ("in place", "out") and place not in ("0", ALL):
                    continue
                for dim in range(dims) if number < _ALL_WAYS else [number % max(1, dims)]:
                    for kind in KINDS if number < _ALL_WAYS else [KINDS[microbatch % len(KINDS)]]:
                        if form == "function" or kind in ("output", "gradient"):
                            name = full_name(op)
                            yield Case(name, number, form, place, kind, dim, sample, call)
                    microbatch += 1
