"""The nodes of one transfer: the collective, and the copies that lay its buffers out.

Functional collectives work on the leading dim. A tensor is seen here as its parts in order, of
local sizes. The sharded part is moved to the front before a scatter, or from the front into its
place after a gather. No copy is made where it is in front already. Results are contiguous: some
kernels read memory as if every tensor were (the backward of layer norm on the CPU, for its
statistics).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.ir.graph import Atom, Slot, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import Collective, local_part_sizes, local_shape
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunked_axes, without_chunks
from autopar.plans.layout import Move
from autopar.runtime.process.stack_lines import FOR
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.symbols import (
    Cuts,
    first_rows,
    local_chunk,
    own_rows,
    padded_shard,
    padded_whole,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Parts:
    """The local sizes of a tensor's parts, in order of (dim, part), with the shape they make."""

    slots: tuple[Slot, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def position(self, slot: Slot) -> int:
        return self.slots.index(slot)


def parts_of(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> Parts:
    """The parts of one rank's shard in `sharding`."""
    local = local_part_sizes(tensor, atoms, sharding, sizes)
    return Parts(
        tuple(slot for slot, _ in tensor.slots()),
        tuple(size for parts in local for size in parts),
        tuple(map(prod, local)),
    )


SENDS = frozenset(
    getattr(c10d, name).default
    for name in (
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "reduce_scatter_tensor",
    )
)
"""The collectives of graphs; their last argument is the group."""

WAIT = c10d.wait_tensor.default


@contextmanager
def sending(graph: fx.Graph, what: str) -> Generator[None]:
    """Inside, collectives that are appended to `graph` are marked as those of `what`, for
    errors."""
    last = next(iter(reversed(graph.nodes)))
    yield
    for node in takewhile(lambda each: each is not last, reversed(graph.nodes)):
        if node.target in SENDS:
            node.meta[FOR] = what


def collective_call(kind: str, num: int, axis: str) -> tuple[Any, tuple[Any, ...]]:
    """The op of a collective over `num` ranks, and its arguments behind the tensor."""
    if kind == "all_reduce":
        return c10d.all_reduce.default, ("sum", axis)
    if kind == "reduce_scatter":
        return c10d.reduce_scatter_tensor.default, ("sum", num, axis)
    if kind == "all_gather":
        return c10d.all_gather_into_tensor.default, (num, axis)
    return c10d.all_to_all_single.default, ([1] * num, [1] * num, axis)


@dataclass(frozen=True, slots=True)
class Packing:
    """How `move` over the mesh axis `axis`, of `num` ranks, brings a tensor from parts `before` to
    parts `after`, in nodes that are appended to `graph`."""

    graph: LeanGraph
    axis: str
    num: int
    before: Parts
    after: Parts
    move: Collective

    @property
    def landed_shape(self) -> Sequence[int]:
        """The shape of the collective's result; not for an all_to_all."""
        shape = self.before.shape
        if self.move.kind == "all_gather":
            return [self.num * shape[0], *shape[1:]]
        return self.after.shape

    def pack(self, x: fx.Node) -> fx.Node:
        """What the collective is given for `x`."""
        if self.move.kind == "reduce_scatter":
            return self._parts(x, self.move.target.slot)
        if self.move.kind == "all_to_all":
            x, _ = self._move_dim(*self._split(x, self.move.target.slot), 0)
        return self.graph.call(aten.contiguous.default, x)

    def unpack(self, landed: fx.Node) -> fx.Node:
        """The tensor, of what has come."""
        if self.move.kind == "all_gather":
            return self._joined(landed, self.move.source.slot)
        if self.move.kind == "all_to_all":
            return self._exchanged(landed, self.move.source.slot, self.move.target.slot)
        return landed

    def cut(self, x: fx.Node) -> fx.Node:
        """The rank's slice of `x`: the dim itself is cut where the part is outermost in it,
        otherwise the part alone."""
        slot = self.move.target.slot
        at = self.before.position(slot)
        first = at - slot[1]
        shape = self.before.shape
        dim = slot[0]
        lead = prod(self.before.sizes[first:at])
        if lead == 1:
            return self.graph.call(local_chunk, x, dim, shape[dim] // self.num, self.axis)
        split = [*shape[:dim], lead, shape[dim] // lead, *shape[dim + 1 :]]
        x = self._reshape(x, shape, split)
        x = self.graph.call(local_chunk, x, dim + 1, split[dim + 1] // self.num, self.axis)
        split[dim + 1] //= self.num
        return self._reshape(x, split, self.after.shape)

    def _reshape(self, x: fx.Node, have: Sequence[int], want: Sequence[int]) -> fx.Node:
        same = tuple(have) == tuple(want)
        return x if same else self.graph.call(aten.reshape.default, x, list(want))

    def _move_dim(
        self, x: fx.Node, shape: Sequence[int], source: int, target: int
    ) -> tuple[fx.Node, list[int]]:
        """`x` of `shape` with dim `source` moved to `target`, and its shape then. Left alone where
        only dims of size 1 are passed: the order in memory is the same."""
        order = list(range(len(shape)))
        order.insert(target, order.pop(source))
        moved = [shape[d] for d in order]
        low, high = sorted((source, target))
        if prod(shape[d] for d in range(low, high + 1) if d != source) == 1:
            return self._reshape(x, shape, moved), moved
        return self.graph.call(aten.permute.default, x, order), moved

    def _joined(self, gathered: fx.Node, slot: Slot) -> fx.Node:
        at = self.before.position(slot)
        lead, rest = prod(self.before.sizes[:at]), prod(self.before.sizes[at:])
        have = self.landed_shape
        if lead > 1:
            split = [self.num, lead, rest]
            gathered = self._reshape(gathered, have, split)
            gathered, have = self._move_dim(gathered, split, 0, 1)
            gathered = self.graph.call(aten.contiguous.default, gathered)
        return self._reshape(gathered, have, self.after.shape)

    def _parts(self, x: fx.Node, slot: Slot) -> fx.Node:
        at = self.before.position(slot)
        lead, rest = prod(self.before.sizes[:at]), prod(self.before.sizes[at:])
        have: Sequence[int] = self.before.shape
        if lead > 1:
            split = [lead, self.num, rest // self.num]
            x, have = self._move_dim(self._reshape(x, have, split), split, 1, 0)
        want = [self.num * self.after.shape[0], *self.after.shape[1:]]
        return self.graph.call(aten.contiguous.default, self._reshape(x, have, want))

    def _split(self, x: fx.Node, target: Slot) -> tuple[fx.Node, list[int], int]:
        """`x` with part `target` cut into one slice per rank along a dim of its own, its shape, and
        that dim."""
        at = self.before.position(target)
        sizes = list(self.before.sizes)
        split = [*sizes[:at], self.num, sizes[at] // self.num, *sizes[at + 1 :]]
        return self._reshape(x, self.before.shape, split), split, at

    def _exchanged(self, x: fx.Node, source: Slot, target: Slot) -> fx.Node:
        """The slices received from the ranks are the outer parts of `source`."""
        at, place = self.before.position(target), self.before.position(source)
        sizes = list(self.before.sizes)
        sizes[at] //= self.num
        x, have = self._move_dim(x, [self.num, *sizes], 0, place)
        if prod(have[:place]) > 1:
            x = self.graph.call(aten.contiguous.default, x)
        return self._reshape(x, have, self.after.shape)


# The nodes of a step that joins or cuts chunks of a dim, which may be uneven.
#
# Collectives send slices of equal length along the leading dim. So the dim in chunks is moved
# there, chunks are padded with zeros, and what is received is cut to the rows that there are. Only
# `runtime.symbols` depend on the rank.


@dataclass(frozen=True, slots=True)
class ChunkPacking:
    """How a step of `kind` joins or cuts chunks. `cuts` cut `size` rows along `dim` of a tensor of
    `num_dims` dims; the step undoes the last of them (a gather) or makes it."""

    graph: LeanGraph
    kind: str
    dim: int
    num_dims: int
    size: int
    cuts: Cuts

    @staticmethod
    def of(
        graph: LeanGraph,
        tensor: TensorType,
        atoms: Sequence[Atom],
        mesh: Mesh,
        move: Move,
        step: Collective,
    ) -> ChunkPacking:
        """For collective `step` of the `move` of a tensor."""
        cut = move.source if step.kind == "all_gather" else move.target
        dim = cut[step.axis].dim
        shape = local_shape(tensor, atoms, without_chunks(cut), mesh.sizes)
        cuts = tuple((mesh[k].name, mesh[k].size) for k in chunked_axes(cut))
        return ChunkPacking(graph, step.kind, dim, len(shape), shape[dim], cuts)

    def cut(self, x: fx.Node) -> fx.Node:
        """The rank's chunk of `x`."""
        return self.graph.call(own_rows, x, self.dim, self.size, self.cuts)

    def pack(self, x: fx.Node) -> fx.Node:
        """What the collective is given for `x`."""
        padded = padded_shard if self.kind == "all_gather" else padded_whole
        x = self.graph.call(padded, self._leading(x), self.num_dims, self.size, self.cuts)
        return self.graph.call(aten.contiguous.default, x)

    def unpack(self, landed: fx.Node) -> fx.Node:
        """The tensor, of what has come."""
        cuts = self.cuts[:-1] if self.kind == "all_gather" else self.cuts
        return self._back(self.graph.call(first_rows, landed, self.size, cuts))

    def _leading(self, x: fx.Node) -> fx.Node:
        """`x` with the dim in chunks first."""
        if self.dim == 0:
            return x
        others = (d for d in range(self.num_dims) if d != self.dim)
        return self.graph.call(aten.permute.default, x, [self.dim, *others])

    def _back(self, x: fx.Node) -> fx.Node:
        if self.dim == 0:
            return x
        order = [*range(1, self.num_dims)]
        order.insert(self.dim, 0)
        x = self.graph.call(aten.permute.default, x, order)
        return self.graph.call(aten.contiguous.default, x)
