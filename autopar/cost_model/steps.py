"""Every step between the states of one tensor, found many at a time.

`redistribute.step` says of two states whether one collective leads from one to the other. Between
hundreds of states there are tens of thousands of pairs that differ on one axis, so that the same
rule is applied here to arrays: per mesh axis and pair of placements there, to all states that are
alike elsewhere. Where chunks are cut, which is rare, `redistribute.step` itself is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from autopar.ir.graph import Atom, TensorType
from autopar.ir.problem import BoolArray, IntArray
from autopar.ir.redistribute import (
    Collective,
    collective,
    local_bytes,
    local_part_sizes,
    nesting,
    step,
)
from autopar.ir.sharding import Placement, Sharding
from autopar.ir.uneven import chunked_axes


class Steps:
    """The steps between `states` of `tensor`; iterating gives each collective with the pairs
    (number of the state before, of the state after) that it joins, an array of two columns.

    `held[i]` is what one rank holds in state `i`, in bytes; `placements[i, k]` the place of what it
    is on axis `k` among all placements there; `chunked[i]` says whether a dim is cut into chunks.
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
        """Per pair and side of `move`, 1 if a rank has several pieces along what stands before the
        part that is sharded there (as `moves` counts them), else 0."""
        found = np.zeros((len(pairs), 2), np.int64)
        for side, placement in enumerate((move.source, move.target)):
            if placement.kind == "S":
                at = self._slots.index(placement.slot)
                state = 0 if side or move.kind == "all_gather" else 1
                found[:, side] = self._leads[pairs[:, state], at] > 1
        return found

    def _numbered(self) -> IntArray:
        number = [{p: i for i, p in enumerate(options)} for options in self._options]
        found = [[number[k][p] for k, p in enumerate(state)] for state in self.states]
        return np.array(found, np.int64).reshape(len(self.states), len(self._options))

    def _at(self) -> IntArray:
        """The number of the state with given placements, or -1."""
        found = np.full([len(options) for options in self._options], -1, np.int64)
        for i, place in enumerate(self.placements.tolist()):
            found[tuple(place)] = i
        return found

    def _is_free(self, axis: int) -> BoolArray:
        """Of every state, whether what `axis` does there can be added or removed: it shards
        nothing, or is the innermost of the axes that shard its part."""
        innermost: dict[tuple[Placement, tuple[int, ...]], bool] = {}
        found: list[bool] = []
        for state in self.states:
            placement = state[axis]
            axes = state.axes_on(placement.slot) if placement.kind == "S" else ()
            if (placement, axes) not in innermost:
                innermost[placement, axes] = not axes or self._nests(placement, axes)[-1] == axis
            found.append(innermost[placement, axes])
        return np.array(found, np.bool_)

    def _nests(self, placement: Placement, axes: tuple[int, ...]) -> tuple[int, ...]:
        return nesting(self.atoms[self.tensor.parts[placement.dim][placement.part]], axes)

    def _is_step(self, pairs: IntArray, free: BoolArray) -> BoolArray:
        found: BoolArray = np.all(free[pairs], axis=1)
        asked: BoolArray = np.any(self.chunked[pairs], axis=1)
        for i in np.flatnonzero(asked).tolist():
            ends: list[int] = pairs[i].tolist()
            tail, head = ends
            move = step(self.tensor, self.atoms, self.states[tail], self.states[head])
            found[i] = move is not None
        return found


def _leads(
    tensor: TensorType, atoms: Sequence[Atom], state: Sharding, sizes: Sequence[int]
) -> list[int]:
    """Per part of the tensor, how many pieces a rank has along all parts before it."""
    local = [n for dim in local_part_sizes(tensor, atoms, state, sizes) for n in dim]
    return [prod(local[:at]) for at in range(len(local))]
