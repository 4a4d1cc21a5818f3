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
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import Collective, local_shape
from autopar.ir.uneven import chunked_axes, without_chunks
from autopar.plans.layout import Move
from autopar.runtime.program.symbols import Cuts, first_rows, own_rows, padded_piece, padded_whole

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def emit_chunks(
    graph: fx.Graph,
    x: fx.Node,
    tensor: TensorType,
    atoms: Sequence[Atom],
    mesh: Mesh,
    move: Move,
    step: Collective,
) -> fx.Node:
    """The nodes, appended to `graph`, that take `x` of type `tensor` through `move`, whose
    collective `step` is."""
    cut = move.source if step.kind == "all_gather" else move.target
    dim = cut[step.axis].dim
    shape = local_shape(tensor, atoms, without_chunks(cut), mesh.sizes)
    cuts = tuple((mesh[k].name, mesh[k].size) for k in chunked_axes(cut))
    return _Emitter(graph, dim, len(shape), shape[dim], cuts).emit(x, step.kind)


@dataclass(frozen=True, slots=True)
class _Emitter:
    """`size` rows along `dim` of a tensor of `num_dims` dims are cut by `cuts`, of which the last
    is undone (a gather) or made."""

    graph: fx.Graph
    dim: int
    num_dims: int
    size: int
    cuts: Cuts

    def emit(self, x: fx.Node, kind: str) -> fx.Node:
        if kind == "slice":
            return self._call(own_rows, x, self.dim, self.size, self.cuts)
        axis, ways = self.cuts[-1]
        x = self._leading(x)
        if kind == "all_gather":
            x = self._call(padded_piece, x, self.num_dims, self.size, self.cuts)
            x = self._wait(c10d.all_gather_into_tensor.default, self._contiguous(x), ways, axis)
            x = self._call(first_rows, x, self.size, self.cuts[:-1])
        else:
            x = self._call(padded_whole, x, self.num_dims, self.size, self.cuts)
            x = self._contiguous(x)
            x = self._wait(c10d.reduce_scatter_tensor.default, x, "sum", ways, axis)
            x = self._call(first_rows, x, self.size, self.cuts)
        return self._back(x)

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

    def _wait(self, target: Any, *args: Any) -> fx.Node:
        return self._call(c10d.wait_tensor.default, self._call(target, *args))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)
