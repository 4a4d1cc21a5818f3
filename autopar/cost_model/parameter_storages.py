"""In what shards a parameter may lie when some of it is given, and not for the planner to choose.

What is given is what DTensor's `Shard(dim)` means: what was `S(0)` in one graph of a model is
`C(0)` in another one where dim 0 is made of other parts, and means the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import is_legal
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunkable_dim, chunked_axes, chunked_dim, stored
from autopar.plans.demands import Test


def storages(
    tensor: TensorType, atoms: Sequence[Atom], mesh: Mesh, tests: Sequence[Test]
) -> tuple[Sharding, ...]:
    """Every storage of `tensor` that meets `tests`, in canonical order. Chunks that may be uneven
    are offered of the dims that are asked for; where none is, of the dim that is chunked anyway,
    or else, if nothing is left, of any."""
    per_axis = [_dims(tensor, [t for t in tests if t.axis == k]) for k in range(len(mesh.axes))]
    found = dict.fromkeys(stored(tensor, atoms, dims, mesh.sizes) for dims in product(*per_axis))
    legal = [s for s in found if is_legal(tensor, atoms, s, mesh.sizes)]
    asked = {p.dim for t in tests if not t.excluded and (p := t.placement) and p.kind in "SC"}
    offered = asked or {chunkable_dim(tensor, mesh.sizes)}
    usual = [s for s in legal if not chunked_axes(s) or chunked_dim(s) in offered]
    return tuple(usual or legal)


def _dims(tensor: TensorType, tests: Sequence[Test]) -> list[int | None]:
    """The dims that one axis may cut, None for none of them."""
    dims: list[int | None] = [None, *range(len(tensor.shape))]
    return [dim for dim in dims if all(_meets(tensor, dim, test) for test in tests)]


def _meets(tensor: TensorType, dim: int | None, test: Test) -> bool:
    if test.what == "unmoved":
        return True
    if test.what == "S":
        found = dim is not None or (prod(tensor.shape) == 1 and not test.excluded)
    else:
        placement = test.placement
        given = None if placement is None or placement.kind == "R" else placement.dim
        found = dim == given and (placement is None or placement.part == 0)
    return found != test.excluded
