"""Ops on tensors in shards for which DTensor gives the result of whole tensors.

DTensor computes a partial result from each shard, and reduces these over ranks. That is not always
the result of the whole tensor. It takes a running sum of each shard by itself, a mean of means, or
fails on ranks that have nothing. So only the ops listed here are computed on shards, and all others
on whole tensors. `tests/edge` checks each line with torch's op database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.runtime.dtensor_private import has_strategy
from autopar.runtime.op_schemas import gives_tensors, is_pointwise
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import compose

aten = torch.ops.aten

_BY_ELEMENT = frozenset(
    {
        aten.clone.default, aten.copy_.default, aten.fill_.Scalar, aten.full_like.default,
        aten.masked_fill_.Scalar, aten.ones_like.default, aten.zero_.default,
        aten.zeros_like.default,
    }
)  # fmt: skip
"""Elementwise ops that torch does not tag as pointwise. It tags losses so, which are means as
well."""

_MATMULS = frozenset(
    {
        aten.addmm.default, aten.bmm.default, aten.dot.default, aten.mm.default, aten.mv.default,
        aten.stack.default,
    }
)  # fmt: skip

_EVEN = frozenset(
    {
        aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax.default,
        aten._softmax_backward_data.default, aten.amax.default,
        aten.amin.default, aten.argmax.default, aten.argmin.default, aten.gather.default,
        aten.max.dim, aten.mean.default, aten.mean.dim, aten.min.dim, aten.topk.default,
    }
)  # fmt: skip
"""Not its `nll_loss`, which takes the mean of ranks' means."""

_OF_A_DIM = frozenset({aten.argmax.default, aten.argmin.default})

_SUMS = frozenset({aten._to_copy.default, aten.sum.default, aten.sum.dim_IntList})


@cache
def is_by_element(op: Any) -> bool:
    """Whether an op is elementwise, and DTensor has it."""
    known = (is_pointwise(op) and "loss" not in op.name()) or op in _BY_ELEMENT
    return known and has_strategy(op) and gives_tensors(op)


@cache
def takes_replicated(op: Any) -> bool:
    """Whether DTensor is right for an op on tensors in shards and replicated ones."""
    return is_by_element(op) or op in _MATMULS


def is_proven(op: Any, args: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether DTensor gives on shards the result of `op` on whole tensors; `given` are the leaves
    of the arguments. False for tensors without elements: views of them have no shape."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    if any(not x.numel() or x.layout != torch.strided for x in tensors):
        return False
    if any(isinstance(x, complex) for x in given):
        return False  # DTensor looks for what it knows by arguments, which it cannot hash
    if takes_replicated(op):
        return True
    if op not in _EVEN and not adds_up(op, args):
        return False
    if op in _OF_A_DIM and (len(args) < 2 or args[1] is None):
        return False
    if op == aten.gather.default and not _is_beside(*args[:3]):
        return False
    return not reduces_all(args) and (adds_up(op, args) or not is_any_uneven(given))


def for_shards(op: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with which DTensor is right: it takes a negative dim of these ops for another
    one (torch 2.13)."""
    if op in _OF_A_DIM and args[1] < 0:
        return (args[0], args[1] + max(1, args[0].dim()), *args[2:])
    return args


def _is_beside(x: Tensor, dim: int, index: Tensor) -> bool:
    """Whether each index of a gather is aligned with the row that it reads. There may be fewer
    indices than rows: DTensor would shard both by that dim, and misalign them (torch 2.13)."""
    if x.dim() != index.dim():
        return False
    dims = [d for d in range(x.dim()) if d != dim % x.dim()]
    return all(x.shape[d] == index.shape[d] for d in dims)


def reduces_all(args: Sequence[Any]) -> bool:
    """Whether an op gets an empty list of dims, which means all: DTensor would reduce none."""
    return any(isinstance(x, (list, tuple)) and not x for x in args)


def is_any_uneven(given: Iterable[Any]) -> bool:
    """Whether any DTensor among `given` is sharded unevenly."""
    return any(
        size % number
        for x in given
        if isinstance(x, DTensor)
        for size, number in zip(x.shape, _ranks_by_dim(x), strict=True)
    )


def is_thin(x: DTensor) -> bool:
    """Whether a dim is sharded over more ranks than it has elements: DTensor cannot write to
    these."""
    return any(size < number for size, number in zip(x.shape, _ranks_by_dim(x), strict=True))


def _ranks_by_dim(x: DTensor) -> list[int]:
    ranks = [1] * x.dim()
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            ranks[placement.dim] *= size
    return ranks


def adds_up(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op's result on an empty shard exists, and adds nothing to the results of the
    others."""
    if op in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
        return 0 < (args[1] if len(args) > 1 else 2) < inf
    return op in _SUMS or "foreach" in op.name()


def added_up(x: Tensor) -> Tensor:
    """A result without partial placements: DTensor refuses many ops on these, or takes them for
    whole."""
    if isinstance(x, DTensor) and any(p.is_partial() for p in x.placements):
        whole = [Replicate() if p.is_partial() else p for p in x.placements]
        return x.redistribute(placements=whole)
    return x


# Ops that torch composes of others in a way that is only right for tensors with memory.
#
# torch looks at the memory of a result, or reads numbers from memory, before any tensor class sees
# an op. With tensors in shards `matrix_rank` would not write to `out=`, `matmul` copies a result of
# another shape, and `tensor_split` finds no memory to read. Here each is composed of ops that
# tensor classes do see, for all tensors alike.


@once
def know_composites() -> None:
    """From now on these ops are right for any tensor."""
    compose("matmul.out", _into(aten.matmul.default))
    rank = aten.linalg_matrix_rank
    for name, op in (
        ("out", rank.default),
        ("out_tol_tensor", rank.tol_tensor),
        ("atol_rtol_tensor_out", rank.atol_rtol_tensor),
        ("atol_rtol_float_out", rank.atol_rtol_float),
    ):
        compose(f"linalg_matrix_rank.{name}", _into(op))
    compose("tensor_split.tensor_indices_or_sections", _split)


def _into(op: Any) -> Any:
    """`op` with `out=`, into which its result is copied."""

    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = op(*args, **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def _split(x: Tensor, at: Tensor, dim: int = 0) -> list[Tensor]:
    numbers: Any = at.tolist()
    return list(torch.tensor_split(x, numbers, dim))
