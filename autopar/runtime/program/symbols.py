"""Symbols in unbound graphs for ops that depend on the rank, and the op of each on one rank.

Rows are elements along a dim of `size` rows that mesh axes cut into chunks, one after the other.
`cuts` has the (name, ranks) of those axes, outermost first, and `uneven.held` gives the rows of
each rank. Nothing calls these functions: `codegen.bind` replaces them by ATen ops, and `spmd` runs
those.

In a graph, a symbol is called with a tensor `x` in place of `index`. `on_rank` calls the function
below it, which returns the op on the rank with this `index` on each mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed  # defines the ops of _c10d_functional

import autopar.runtime.ops.attention_shard  # noqa: F401 - registers its ops
from autopar.ir.uneven import chunk_length, held

aten = torch.ops.aten

Cuts = tuple[tuple[str, int], ...]
Resolved = tuple[Any, tuple[Any, ...]]
"""An op, and its arguments behind the first one, a tensor."""

CutShard = tuple[int, Cuts, int]
"""(length, cuts, back): the axes of `cuts` shard a dim into `length` elements each. This is the
shard `back` places before this rank's, and the last one is before the first."""

_ON_A_RANK: dict[Any, Callable[..., Resolved]] = {}


def _symbol(resolve: Callable[..., Resolved]) -> Callable[..., NoReturn]:
    """The symbol in graphs whose op on a rank `resolve` returns."""

    @wraps(resolve)
    def unbound(_: Any, *args: Any) -> NoReturn:
        raise NotImplementedError(
            f"{resolve.__name__}{args} of a graph that is not bound: `codegen.bind` binds it"
        )

    _ON_A_RANK[unbound] = resolve
    return unbound


@_symbol
def local_chunk(index: Mapping[str, int], dim: int, length: int, axis: str) -> Resolved:
    """The `length` elements of `x` along `dim` that belong to this rank's index on mesh axis
    `axis`."""
    start = index[axis] * length
    return aten.slice.Tensor, (dim, start, start + length)


@_symbol
def local_position(index: Mapping[str, int], length: int, path: Cuts) -> Resolved:
    """The indices `x` into a dim, counted from where this rank's shard of `length` elements begins.
    The dim is sharded along the axes of `path`, (name, size) each, outermost first."""
    return aten.sub.Scalar, (_start(index, (length, path, 0)),)


@_symbol
def permute(index: Mapping[str, int], length: int, num_ranks: int, axis: str) -> Resolved:
    """`x`, a list of `length` elements, from the rank before this one on mesh axis `axis`, of
    `num_ranks` ranks; the last rank is before the first."""
    here = index[axis]
    gets, gives = ([0] * num_ranks for _ in range(2))
    gets[(here - 1) % num_ranks] = gives[(here + 1) % num_ranks] = length
    return torch.ops._c10d_functional.all_to_all_single.default, (gets, gives, axis)


@_symbol
def attention_shard(index: Mapping[str, int], *args: Any) -> Resolved:
    """Causal attention of (q, k, v, mask, scale, queries, keys), where `q` is the shard `queries`
    of the sequence, and `k` and `v` are the shard `keys`."""
    return _attention(torch.ops.autopar.sdpa_shard.default, index, *args)


@_symbol
def attention_shard_backward(index: Mapping[str, int], *args: Any) -> Resolved:
    """Its backward, of (grad_out, q, k, v, out, lse, mask, scale, queries, keys)."""
    return _attention(torch.ops.autopar.sdpa_shard_backward.default, index, *args)


@_symbol
def own_rows(index: Mapping[str, int], dim: int, size: int, cuts: Cuts) -> Resolved:
    """The rows of this rank along `dim` of `x`, which has those left by all `cuts` but the last."""
    axis, num_parts = cuts[-1]
    start, length = held(_length(index, size, cuts[:-1]), [(num_parts, index[axis])])
    return aten.slice.Tensor, (dim, start, start + length)


@_symbol
def first_rows(index: Mapping[str, int], size: int, cuts: Cuts) -> Resolved:
    """As many rows from the start of dim 0 of `x` as this rank has after `cuts`."""
    return aten.slice.Tensor, (0, 0, _length(index, size, cuts))


@_symbol
def padded_shard(index: Mapping[str, int], num_dims: int, size: int, cuts: Cuts) -> Resolved:
    """`x`, of `num_dims` dims, with the rows of this rank along dim 0, padded with zeros to the
    largest chunk of the last cut, and to at least one row."""
    return _padded(num_dims, _length(index, size, cuts), _chunk(index, size, cuts))


@_symbol
def padded_whole(index: Mapping[str, int], num_dims: int, size: int, cuts: Cuts) -> Resolved:
    """`x`, of `num_dims` dims, with the rows left by all `cuts` but the last along dim 0, padded
    with zeros. The last cut then gives slices as long as those of `padded_shard`."""
    have, (_, num_parts) = _length(index, size, cuts[:-1]), cuts[-1]
    return _padded(num_dims, have, num_parts * _chunk(index, size, cuts))


SYMBOLS = frozenset(_ON_A_RANK)


def on_rank(symbol: Any, args: Sequence[Any], index: Mapping[str, int]) -> Resolved:
    """The op of `symbol`, with `args` behind the first one, on the rank with this `index` on each
    mesh axis."""
    return _ON_A_RANK[symbol](index, *args)


def _start(index: Mapping[str, int], shard: CutShard) -> int:
    """The position where a shard begins."""
    length, cuts, back = shard
    at, count = 0, 1
    for axis, num_parts in cuts:
        at, count = at * num_parts + index[axis], count * num_parts
    return (at - back) % count * length


def _attention(op: Any, index: Mapping[str, int], *args: Any) -> Resolved:
    *rest, queries, keys = args
    return op, (*rest, _start(index, queries), _start(index, keys))


def _padded(num_dims: int, have: int, want: int) -> Resolved:
    if have == want:
        return aten.contiguous.default, ()
    return aten.constant_pad_nd.default, ([0, 0] * (num_dims - 1) + [0, want - have],)


def _length(index: Mapping[str, int], size: int, cuts: Cuts) -> int:
    """Rows of this rank after `cuts`."""
    return held(size, [(num_parts, index[axis]) for axis, num_parts in cuts])[1]


def _chunk(index: Mapping[str, int], size: int, cuts: Cuts) -> int:
    """Rows of each padded slice of the last cut."""
    return max(1, chunk_length(_length(index, size, cuts[:-1]), cuts[-1][1]))
