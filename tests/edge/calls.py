"""A call as eager makes it and with tensors in shards, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.runtime.dtensor_private import cut_shard, dtensor_of, is_of, shard_elsewhere
from autopar.runtime.program.sharded import ShardedOutput, whole_of
from autopar.runtime.program.sharded_ops import Place
from autopar.runtime.torch_private import flatten, unflatten
from tests.edge.samples import Case, seed

RELATIVE, ABSOLUTE = 1e-7, 1e-9
"""How far values in float64 may be apart."""

NO_VALUES = ("empty", "new_empty", "resize_")
"""Ops that give tensors without values."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """That of all ranks, and that of the last one."""

    world: DeviceMesh
    last: DeviceMesh

    def of(self, case: Case, x: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Where shards of `x` are."""
        cut: Placement = Shard(case.dim % x.dim()) if x.dim() else Replicate()
        return self.last if case.kind == "elsewhere" else self.world, (cut,)


class _Cut(torch.autograd.Function):
    """An output in shards, of which a model would be what comes before."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, place: Place
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        assert place.mesh is not None
        return ShardedOutput(cut_shard(x, place.mesh, place.placements).clone(), place, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if grad is None else whole_of(grad), None


def in_shards(x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """`x` as an output in shards, whose gradient goes to `x`."""
    return _Cut.apply(x, Place(mesh, placements))


def outcome(case: Case, meshes: Meshes | None) -> list[Any]:
    """What comes of a call: results, what was written to, then gradients, whole and plain. Without
    meshes all is plain."""
    leaves, graded = list(case.sample.leaves), list[Tensor]()
    for k in case.sample.places:
        leaves[k], leaf = _given(case, leaves[k], meshes if k in case.cut else None)
        graded.append(leaf)
    first, args, kwargs = unflatten(leaves, case.sample.spec)
    written = [leaves[0]] if case.form == "in place" else []
    if "out" in case.form:
        out = _blank_result(case)
        if out is None:
            return []
        place = None if case.form == "beside out" else meshes
        kwargs = {**kwargs, "out": _given(case, out, place)[0]}
        written = [kwargs["out"]]
    seed(1)
    with torch.set_grad_enabled(case.kind != "gradient" and "out" not in case.form):
        made = case.call(first, *args, **kwargs)
    results = flatten(made)[0] + written
    found = [_plain(x) if isinstance(x, Tensor) else x for x in results]
    ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if ends:
        cast("Any", sum(map(_weighted, ends))).backward()
        found += [None if x.grad is None else _plain(x.grad) for x in graded]
    return found


def _given(case: Case, x: Tensor, meshes: Meshes | None) -> tuple[Tensor, Tensor]:
    """A tensor like that of a sample, and the leaf that its gradient is of."""
    copy = x.detach().clone()
    needs_gradient = x.requires_grad and case.kind != "gradient"
    if meshes is None or case.kind == "output":
        leaf = copy.requires_grad_(needs_gradient)
        if meshes is not None:
            return in_shards(leaf, *meshes.of(case, x)), leaf
        return (leaf.clone() if case.form == "in place" and needs_gradient else leaf), leaf
    mesh, placements = meshes.of(case, x)
    copy = copy.contiguous()
    piece = cut_shard(copy, mesh, placements) if is_of(mesh) else shard_elsewhere(copy, "cpu")
    made = dtensor_of(piece.clone(), copy, mesh, placements).requires_grad_(needs_gradient)
    return made, made


def _blank_result(case: Case) -> Tensor | None:
    """What may be `out=`; None where a call gives other than one tensor."""
    first, args, kwargs = unflatten(case.sample.leaves, case.sample.spec)
    seed(1)
    with torch.no_grad():
        made = case.call(first, *args, **kwargs)
    plain = isinstance(made, Tensor) and made.layout == torch.strided
    return torch.zeros_like(made) if plain else None


def _weighted(x: Tensor) -> Tensor:
    """A number whose gradient is another one for each element."""
    weights = torch.linspace(0.5, 1.5, max(1, x.numel()), dtype=torch.float64)
    made = (x * weights[: x.numel()].reshape(x.shape)).sum()
    return made.abs() if made.is_complex() else made


def _plain(x: Tensor) -> Tensor:
    return whole_of(x).detach().clone()


def difference(case: Case, expected: Sequence[Any], found: Sequence[Any]) -> str:
    """What of a call is other than eager's, or nothing."""
    if len(expected) != len(found):
        return f"{len(found)} results for {len(expected)}"
    pairs = enumerate(zip(expected, found, strict=True))
    told = (_told(a, b, not case.op.startswith(NO_VALUES), f"result {k}") for k, (a, b) in pairs)
    return next(filter(None, told), "")


def _told(a: Any, b: Any, has_values: bool, name: str) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        if isinstance(b, Tensor) and a is None and not b.numel():
            return ""  # eager has no gradient of nothing
        same = type(a) is type(b) and (a == b or (a != a and b != b))
        if isinstance(a, float | complex) and type(a) is type(b):
            same = same or abs(a - b) <= ABSOLUTE + RELATIVE * abs(a)
        return "" if same else f"{name} is {b} for {a}"
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return f"{name} is {b.dtype}{list(b.shape)} for {a.dtype}{list(a.shape)}"
    if not has_values:
        return ""
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    close = torch.allclose(a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
    return "" if close else f"{name} has other values"
