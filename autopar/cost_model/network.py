"""The states a tensor may pass through, and every step between two of them with its price.

On three axes a tensor has a hundred states and a thousand steps, and many tensors of a model are
alike: the same sizes, the same ends. A `Networks` works out each kind once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.buckets import Sharing
from autopar.cost_model.moves import move_ns
from autopar.graph import Atom, TensorType, itemsize
from autopar.mesh import Device, Mesh
from autopar.problem import IntArray
from autopar.reshard import is_legal, step
from autopar.sharding import Placement, R, Sharding


@dataclass(frozen=True, slots=True)
class Network:
    """`states`, and the steps from `states[tails[k]]` to `states[heads[k]]`, of `costs[k]`
    nanoseconds each."""

    states: tuple[Sharding, ...]
    tails: IntArray
    heads: IntArray
    costs: IntArray


class Networks:
    """The networks of tensors made of `atoms` on a mesh."""

    def __init__(self, atoms: Sequence[Atom], mesh: Mesh, device: Device, sharing: Sharing) -> None:
        self.atoms, self.mesh, self.device, self.sharing = atoms, mesh, device, sharing
        self._known: dict[object, Network] = {}

    def between(self, tensor: TensorType, ends: Iterable[Sharding], *, bucketed: bool) -> Network:
        """The network of `tensor` between the states `ends`; `bucketed` as in `buckets`."""
        found = frozenset(ends)
        parts = tuple(
            tuple((self.atoms[a].size, self.atoms[a].in_param) for a in dim) for dim in tensor.parts
        )
        kind = itemsize(tensor.dtype), parts, found, bucketed
        if kind not in self._known:
            self._known[kind] = self._make(tensor, found, bucketed)
        return self._known[kind]

    def _make(self, tensor: TensorType, ends: Iterable[Sharding], bucketed: bool) -> Network:
        sharing = self.sharing if bucketed else None
        states = closure(tensor, self.atoms, ends, self.mesh.sizes)
        number = {state: i for i, state in enumerate(states)}
        options = [_ordered({s[k] for s in states}) for k in range(len(self.mesh.axes))]
        found: list[tuple[int, int, int]] = []
        for tail, source in enumerate(states):
            for axis, placements in enumerate(options):
                for placement in placements:
                    target = source.with_axis(axis, placement)
                    head = number.get(target, tail)
                    move = step(tensor, self.atoms, source, target) if head != tail else None
                    if move is not None:
                        ns = move_ns(
                            tensor, self.atoms, source, target, move, self.mesh, self.device,
                            sharing=sharing,
                        )  # fmt: skip
                        found.append((tail, head, ns))
        columns = np.array(found, np.int64).reshape(-1, 3).T
        return Network(states, *(np.ascontiguousarray(column) for column in columns))


def closure(
    tensor: TensorType,
    atoms: Sequence[Atom],
    ends: Iterable[Sharding],
    sizes: Sequence[int],
) -> tuple[Sharding, ...]:
    """The states a tensor may pass through between `ends`: per axis what some end has there, or R.
    Canonical order."""
    per_axis: list[set[Placement]] = [{R} for _ in sizes]
    for sharding in ends:
        for axis, placement in enumerate(sharding):
            per_axis[axis].add(placement)
    ordered = (_ordered(found) for found in per_axis)
    found = (Sharding(combination) for combination in product(*ordered))
    return tuple(s for s in found if is_legal(tensor, atoms, s, sizes))


def _ordered(placements: Iterable[Placement]) -> list[Placement]:
    return sorted(placements, key=_canonical)


def _canonical(placement: Placement) -> tuple[str, Placement]:
    return {"R": "0", "S": "1", "C": "2", "P": "3"}[placement.kind], placement
