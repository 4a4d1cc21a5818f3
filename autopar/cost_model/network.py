"""The shardings (states) that a tensor may pass through, and all steps between two, with prices.

On three axes a tensor has a hundred states and a thousand steps, and a model of a thousand
different layers has ten thousand tensors. Many of them are alike, up to the sizes of their atoms:
states and steps are enumerated once for each kind, and each kind of step is priced for all sizes.
A search prices a model many times, with other recomputed ops or microbatches, and most tensors are
then the same: the last networks are cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations as _some
from itertools import product
from math import prod
from typing import cast

import numpy as np

from autopar.cost_model.moves import moves_ns
from autopar.ir.buckets import Sharing
from autopar.ir.graph import Atom, TensorType, itemsize
from autopar.ir.mesh import Device, Mesh
from autopar.ir.problem import BoolArray, IntArray
from autopar.ir.redistribute import (
    Collective,
    collective,
    is_legal,
    local_bytes,
    local_part_sizes,
    nesting,
    step,
)
from autopar.ir.sharding import Placement, R, Sharding
from autopar.ir.uneven import chunked_axes

# All steps between the states of one tensor, in arrays.
#
# `redistribute.step` says of two states whether one collective leads from one to the other. Between
# hundreds of states there are tens of thousands of pairs that differ on one axis. The same rule is
# therefore applied here to arrays: per mesh axis and pair of placements there, to all states that
# are equal elsewhere. For uneven chunks, which are rare, `redistribute.step` itself is called.


class Steps:
    """The steps between `states` of `tensor`. Iterating gives each collective with an array of two
    columns: the pairs (index of the state before, of the state after) that it joins.

    `held[i]` are the bytes of one rank in state `i`. `placements[i, k]` is the number of the
    placement on axis `k`, among all placements there. `chunked[i]` says whether a dim is cut into
    uneven chunks.
    """

    def __init__(
        self,
        tensor: TensorType,
        atoms: Sequence[Atom],
        states: Sequence[Sharding],
        sizes: Sequence[int],
    ) -> None:
        self.tensor, self.atoms, self.states = tensor, atoms, states
        self.held = np.array([local_bytes(tensor, atoms, s, sizes) for s in states], np.int64)
        self._slots = [slot for slot, _ in tensor.slots()]
        self._leads = np.array([_leads(tensor, atoms, s, sizes) for s in states], np.int64)
        self.chunked = np.array([bool(chunked_axes(s)) for s in states], np.bool_)
        self._options = [list(dict.fromkeys(s[k] for s in states)) for k in range(len(sizes))]
        self.placements = self._numbered()
        self._places = self._at()

    def __iter__(self) -> Iterator[tuple[Collective, IntArray]]:
        for axis, options in enumerate(self._options):
            free = self._is_free(axis)
            places = np.moveaxis(self._places, axis, 0)
            for a, source in enumerate(options):
                for b, target in enumerate(options):
                    move = collective(axis, source, target)
                    if move is None:
                        continue
                    pairs = np.stack([places[a].ravel(), places[b].ravel()], axis=1)
                    pairs = pairs[(pairs >= 0).all(axis=1)]
                    pairs = pairs[self._is_step(pairs, free)]
                    if len(pairs):
                        yield move, pairs

    def leads(self, move: Collective, pairs: IntArray) -> IntArray:
        """Per pair and side of `move`, 1 if the local tensor has more than one index along the
        parts before the sharded one (as `moves` counts them), else 0."""
        flags = np.zeros((len(pairs), 2), np.int64)
        for side, placement in enumerate((move.source, move.target)):
            if placement.kind == "S":
                at = self._slots.index(placement.slot)
                state = 0 if side or move.kind == "all_gather" else 1
                flags[:, side] = self._leads[pairs[:, state], at] > 1
        return flags

    def _numbered(self) -> IntArray:
        number = [{p: i for i, p in enumerate(options)} for options in self._options]
        placements = [[number[k][p] for k, p in enumerate(state)] for state in self.states]
        return np.array(placements, np.int64).reshape(len(self.states), len(self._options))

    def _at(self) -> IntArray:
        """The number of the state with given placements, or -1."""
        numbers = np.full([len(options) for options in self._options], -1, np.int64)
        for i, place in enumerate(self.placements.tolist()):
            numbers[tuple(place)] = i
        return numbers

    def _is_free(self, axis: int) -> BoolArray:
        """Per state, whether the placement on `axis` can be added or removed: `axis` shards
        nothing there, or is the innermost of the axes that shard its part."""
        innermost: dict[tuple[Placement, tuple[int, ...]], bool] = {}
        is_free: list[bool] = []
        for state in self.states:
            placement = state[axis]
            axes = state.axes_on(placement.slot) if placement.kind == "S" else ()
            if (placement, axes) not in innermost:
                innermost[placement, axes] = not axes or self._nests(placement, axes)[-1] == axis
            is_free.append(innermost[placement, axes])
        return np.array(is_free, np.bool_)

    def _nests(self, placement: Placement, axes: tuple[int, ...]) -> tuple[int, ...]:
        return nesting(self.atoms[self.tensor.parts[placement.dim][placement.part]], axes)

    def _is_step(self, pairs: IntArray, free: BoolArray) -> BoolArray:
        is_step: BoolArray = np.all(free[pairs], axis=1)
        is_chunked: BoolArray = np.any(self.chunked[pairs], axis=1)
        for i in np.flatnonzero(is_chunked).tolist():
            ends: list[int] = pairs[i].tolist()
            tail, head = ends
            move = step(self.tensor, self.atoms, self.states[tail], self.states[head])
            is_step[i] = move is not None
        return is_step


def _leads(
    tensor: TensorType, atoms: Sequence[Atom], state: Sharding, sizes: Sequence[int]
) -> list[int]:
    """Per part of the tensor, the local size of all parts before it, as a product."""
    local = [n for dim in local_part_sizes(tensor, atoms, state, sizes) for n in dim]
    return [prod(local[:at]) for at in range(len(local))]


_REMEMBERED = 512
"""How many kinds of networks are cached: a model has about a hundred on one mesh."""


@dataclass(frozen=True, slots=True)
class Network:
    """The states of a tensor, and the steps between them. Step `k` leads from `states[tails[k]]` to
    `states[heads[k]]`, takes `costs[k]` nanoseconds, and the host launches it in `hosts[k]`.
    `axes[k]` is the mesh axis whose links it takes, -1 if none. `placements[i, k]` is the number of
    the placement of state `i` on axis `k`. `names` are the texts of states, `place` their indices.
    """

    states: tuple[Sharding, ...]
    names: tuple[str, ...]
    place: Mapping[Sharding, int]
    placements: IntArray
    tails: IntArray
    heads: IntArray
    costs: IntArray
    hosts: IntArray
    axes: IntArray


_Tensor = tuple[TensorType, tuple[Atom, ...]]
"""A tensor and its atoms."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """`tensor` is redistributed between states among `ends`; `bucketed` is as in `ir.buckets`."""

    tensor: TensorType
    ends: frozenset[Sharding]
    bucketed: bool


def networks(
    moves: Sequence[MoveRequest],
    atoms: Sequence[Atom],
    mesh: Mesh,
    device: Device,
    sharing: Sharing,
) -> list[Network]:
    """The network of each of `moves`, whose tensors have these `atoms`."""
    part_counts = sorted(
        {prod(some) for n in range(len(mesh.sizes) + 1) for some in _some(mesh.sizes, n)}
    )
    kinds = [(atom.in_param, *(_cut(atom.size, n) for n in part_counts)) for atom in atoms]
    alike: dict[object, dict[tuple[int, ...], list[int]]] = {}
    for number, each in enumerate(moves):
        parts = tuple(tuple(kinds[atom] for atom in dim) for dim in each.tensor.parts)
        kind = itemsize(each.tensor.dtype), parts, each.ends, each.bucketed
        sizes = tuple(atoms[atom].size for _, atom in each.tensor.slots())
        alike.setdefault(kind, {}).setdefault(sizes, []).append(number)
    by_number: dict[int, Network] = {}
    for members in alike.values():
        some = [moves[numbers[0]] for numbers in members.values()]
        tensors = tuple(_with_own_atoms(each.tensor, atoms) for each in some)
        used = sharing if some[0].bucketed else None
        of_kind = _make(tensors, some[0].ends, mesh, device, used)
        for network, numbers in zip(of_kind, members.values(), strict=True):
            by_number |= dict.fromkeys(numbers, network)
    return [by_number[number] for number in range(len(moves))]


def _cut(size: int, num_parts: int) -> int:
    """How an atom divides into `num_parts`: 0 if it does not, 1 if into parts of one element, else
    2. States and steps depend on sizes in no other way."""
    return 0 if size % num_parts else 1 if size == num_parts else 2


def _with_own_atoms(tensor: TensorType, atoms: Sequence[Atom]) -> _Tensor:
    """The tensor with atoms of its own, which have no names."""
    numbers = list(dict.fromkeys(atom for _, atom in tensor.slots()))
    place = {number: i for i, number in enumerate(numbers)}
    parts = tuple(tuple(place[atom] for atom in dim) for dim in tensor.parts)
    own = tuple(replace(atoms[number], name="") for number in numbers)
    return replace(tensor, parts=parts), own


@lru_cache(maxsize=_REMEMBERED)
def _make(
    alike: tuple[_Tensor, ...],
    ends: frozenset[Sharding],
    mesh: Mesh,
    device: Device,
    sharing: Sharing | None,
) -> list[Network]:
    """The networks of tensors that differ only in the sizes of their atoms."""
    tensor, atoms = alike[0]
    states = closure(tensor, atoms, ends, mesh.sizes)
    steps = Steps(tensor, atoms, states, mesh.sizes)
    stack = _stacked(alike) if len(alike) > 1 else (tensor, atoms)
    joined: list[IntArray] = [np.empty((0, 2), np.int64)]
    costs: list[IntArray] = [np.empty((2, len(alike), 0), np.int64)]
    axes: list[IntArray] = [np.empty(0, np.int64)]
    for move, pairs in steps:
        first, kind = _kinds(steps, move, pairs)
        steps_of: list[list[int]] = pairs[first].tolist()
        between = [(states[tail], states[head]) for tail, head in steps_of]
        priced = moves_ns(*stack, between, move, mesh, device, sharing=sharing)
        joined.append(pairs)
        axes.append(np.full(len(pairs), -1 if move.kind == "slice" else move.axis))
        by_kind = np.reshape(priced, (2, len(first), len(alike)))
        costs.append(by_kind.transpose(0, 2, 1)[:, :, kind])
    arcs, by_tensor = np.concatenate(joined), np.concatenate(costs, axis=2)
    order = np.lexsort((arcs[:, 1], arcs[:, 0]))
    tails, heads = (np.ascontiguousarray(column) for column in arcs[order].T)
    names, place = tuple(map(str, states)), {state: i for i, state in enumerate(states)}
    by_axis = np.concatenate(axes)[order]
    return [
        Network(states, names, place, steps.placements, tails, heads, ns, hosts, by_axis)
        for ns, hosts in zip(*by_tensor[:, :, order], strict=True)
    ]


def _stacked(alike: Sequence[_Tensor]) -> _Tensor:
    """All of these tensors as one, whose atoms have arrays of sizes."""
    (one, atoms), stacked, parts = alike[0], list[Atom](), list[tuple[int, ...]]()
    for dim, of_dim in enumerate(one.parts):
        for part, number in enumerate(of_dim):
            own = [each[tensor.parts[dim][part]].size for tensor, each in alike]
            sizes = np.array(own, np.int64)
            stacked.append(replace(atoms[number], size=cast("int", sizes)))
        parts.append(tuple(range(len(stacked) - len(of_dim), len(stacked))))
    shape = tuple(prod(stacked[number].size for number in of_dim) for of_dim in parts)
    return TensorType(one.dtype, shape, tuple(parts)), tuple(stacked)


def _kinds(steps: Steps, move: Collective, pairs: IntArray) -> tuple[IntArray, IntArray]:
    """The index of the first pair of each price, and for every pair the number of its price. A
    price depends on the bytes before and after, and on whether they must be copied into place; for
    uneven chunks, on the states themselves."""
    chunks = np.where(steps.chunked[pairs].any(axis=1), np.arange(len(pairs)), -1)
    kinds = np.concatenate([steps.held[pairs], steps.leads(move, pairs), chunks[:, None]], axis=1)
    _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    return first, kind.ravel()


def closure(
    tensor: TensorType,
    atoms: Sequence[Atom],
    ends: Collection[Sharding],
    sizes: Sequence[int],
) -> tuple[Sharding, ...]:
    """The states that a tensor may pass through between `ends`, in canonical order: on each axis
    the placement of any end, or R."""
    per_axis = [{R, *(state[axis] for state in ends)} for axis in range(len(sizes))]
    ordered = (sorted(some, key=lambda p: ("RSCP".index(p.kind), p)) for some in per_axis)
    states = (Sharding(combination) for combination in product(*ordered))
    return tuple(s for s in states if is_legal(tensor, atoms, s, sizes))
