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
from autopar.cost_model.steps import Steps
from autopar.graph import Atom, TensorType, itemsize
from autopar.mesh import Device, Mesh
from autopar.problem import IntArray
from autopar.reshard import Collective, is_legal
from autopar.sharding import Placement, R, Sharding


@dataclass(frozen=True, slots=True)
class Network:
    """`states`, and the steps from `states[tails[k]]` to `states[heads[k]]`, of `costs[k]`
    nanoseconds each. `placements` are numbers for what the states are on each axis."""

    states: tuple[Sharding, ...]
    placements: IntArray
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
        states = closure(tensor, self.atoms, ends, self.mesh.sizes)
        steps = Steps(tensor, self.atoms, states, self.mesh.sizes)
        sharing = self.sharing if bucketed else None
        found: list[IntArray] = []
        for move, pairs in steps:
            costs = self._costs(tensor, steps, move, pairs, sharing)
            found.append(np.stack([pairs[:, 0], pairs[:, 1], costs], axis=1))
        arcs = np.concatenate([np.empty((0, 3), np.int64), *found])
        order = np.lexsort((arcs[:, 1], arcs[:, 0]))
        return Network(
            states, steps.placements, *(np.ascontiguousarray(column) for column in arcs[order].T)
        )

    def _costs(
        self,
        tensor: TensorType,
        steps: Steps,
        move: Collective,
        pairs: IntArray,
        sharing: Sharing | None,
    ) -> IntArray:
        """Nanoseconds of `move` between each of `pairs`. It depends on how many bytes are held
        before and after, on whether they must be copied into place, and where chunks are cut on the
        states themselves."""
        states, held = steps.states, steps.held
        chunks = np.where(steps.chunked[pairs].any(axis=1), np.arange(len(pairs)), -1)
        leads = steps.leads(move, pairs)
        kinds = np.concatenate([held[pairs], leads, chunks[:, None]], axis=1)
        _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        ends: list[list[int]] = pairs[first].tolist()
        prices = [
            move_ns(
                tensor, self.atoms, states[tail], states[head], move, self.mesh, self.device,
                sharing=sharing,
            )
            for tail, head in ends
        ]  # fmt: skip
        return np.array(prices, np.int64)[kind.ravel()]


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
