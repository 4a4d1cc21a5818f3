"""The nodes of a step that joins or cuts chunks of a dim, which may be uneven.

Collectives send pieces of equal length along the leading dim: the dim in chunks is brought there,
chunks are padded with zeros, and what comes is cut to the rows that are there. All of it depends on
the rank by `runtime.symbols` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import Collective, local_shape
from autopar.ir.uneven import chunked_axes, without_chunks
from autopar.plans.layout import Move
from autopar.runtime.program.symbols import Cuts, first_rows, own_rows, padded_piece, padded_whole

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ChunkPacking:
    """How a step of `kind` joins or cuts chunks: `size` rows along `dim` of a tensor of `num_dims`
    dims are cut by `cuts`, of which the last is undone (a gather) or made."""

    graph: fx.Graph
    kind: str
    dim: int
    num_dims: int
    size: int
    cuts: Cuts

    @staticmethod
    def of(
        graph: fx.Graph,
        tensor: TensorType,
        atoms: Sequence[Atom],
        mesh: Mesh,
        move: Move,
        step: Collective,
    ) -> ChunkPacking:
        """For `move` of a tensor, whose collective `step` is."""
        cut = move.source if step.kind == "all_gather" else move.target
        dim = cut[step.axis].dim
        shape = local_shape(tensor, atoms, without_chunks(cut), mesh.sizes)
        cuts = tuple((mesh[k].name, mesh[k].size) for k in chunked_axes(cut))
        return ChunkPacking(graph, step.kind, dim, len(shape), shape[dim], cuts)

    def cut(self, x: fx.Node) -> fx.Node:
        """The rank's chunk of `x`."""
        return self._call(own_rows, x, self.dim, self.size, self.cuts)

    def pack(self, x: fx.Node) -> fx.Node:
        """What the collective is given for `x`."""
        padded = padded_piece if self.kind == "all_gather" else padded_whole
        x = self._call(padded, self._leading(x), self.num_dims, self.size, self.cuts)
        return self._contiguous(x)

    def unpack(self, landed: fx.Node) -> fx.Node:
        """The tensor, of what has come."""
        cuts = self.cuts[:-1] if self.kind == "all_gather" else self.cuts
        return self._back(self._call(first_rows, landed, self.size, cuts))

    def _leading(self, x: fx.Node) -> fx.Node:
        """`x` with the dim in chunks first."""
        if self.dim == 0:
            return x
        others = (d for d in range(self.num_dims) if d != self.dim)
        return self._call(aten.permute.default, x, [self.dim, *others])

    def _back(self, x: fx.Node) -> fx.Node:
        if self.dim == 0:
            return x
        order = [*range(1, self.num_dims)]
        order.insert(self.dim, 0)
        return self._contiguous(self._call(aten.permute.default, x, order))

    def _contiguous(self, x: fx.Node) -> fx.Node:
        return self._call(aten.contiguous.default, x)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)
