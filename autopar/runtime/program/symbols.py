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
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed  # defines the ops of _c10d_functional

import autopar.runtime.ops.attention_shard  # noqa: F401 - registers its ops
from autopar.ir.uneven import chunk_length, held

aten = torch.ops.aten

Cuts = tuple[tuple[str, int], ...]
Slice = tuple[int, int]
Resolved = tuple[Any, tuple[Any, ...]]
"""An op, and its arguments behind the first one, a tensor."""


class CutShard(NamedTuple):
    """The axes of `cuts` shard a dim into `length` elements each. This is the shard `back` places
    before this rank's, and the last one is before the first. If `mirrored` it is that shard of this
    rank's mirror: of n ranks, n - 1 - r is the mirror of r. It begins `skipped` elements later."""

    length: int
    cuts: Cuts
    back: int = 0
    mirrored: bool = False
    skipped: int = 0


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
    return aten.sub.Scalar, (_start(index, CutShard(length, path)),)


@_symbol
def permute(index: Mapping[str, int], length: int, num_ranks: int, axis: str) -> Resolved:
    """`x`, a list of `length` elements, from the rank before this one on mesh axis `axis`, of
    `num_ranks` ranks; the last rank is before the first."""
    here = index[axis]
    gets, gives = ([0] * num_ranks for _ in range(2))
    gets[(here - 1) % num_ranks] = gives[(here + 1) % num_ranks] = length
    return torch.ops._c10d_functional.all_to_all_single.default, (gets, gives, axis)


@_symbol
def mirror(index: Mapping[str, int], length: int, num_ranks: int, axis: str) -> Resolved:
    """`x`, a list of `length` elements, from this rank's mirror on mesh axis `axis`, of `num_ranks`
    ranks."""
    lengths = [0] * num_ranks
    lengths[num_ranks - 1 - index[axis]] = length
    return torch.ops._c10d_functional.all_to_all_single.default, (lengths, lengths, axis)


@_symbol
def zigzag_slice(
    index: Mapping[str, int], dim: int, low: Slice, high: Slice, num_ranks: int, axis: str
) -> Resolved:
    """The elements of `x` along `dim` that `low` has on ranks whose own shard is before that of
    their mirror, or that is their own mirror, and `high` on others."""
    return aten.slice.Tensor, (dim, *(low if _is_low(index[axis], num_ranks) else high))


@_symbol
def zigzag_block(index: Mapping[str, int], *args: Any) -> Resolved:
    """A block of a causal ring in zig-zag order, of (q, k, v, scale, step, length, num_ranks,
    axis)."""
    return _zigzag_block(torch.ops.autopar.sdpa_rows.default, index, *args)


@_symbol
def zigzag_block_backward(index: Mapping[str, int], *args: Any) -> Resolved:
    """Its backward, of (grad_out, q, k, v, out, lse, scale, step, length, num_ranks, axis)."""
    return _zigzag_block(torch.ops.autopar.sdpa_rows_backward.default, index, *args)


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
    at, count = 0, 1
    for axis, num_parts in shard.cuts:
        at, count = at * num_parts + index[axis], count * num_parts
    if shard.mirrored:
        at = count - 1 - at
    return (at - shard.back) % count * shard.length + shard.skipped


def _attention(op: Any, index: Mapping[str, int], *args: Any) -> Resolved:
    *rest, queries, keys = args
    return op, (*rest, _start(index, queries), _start(index, keys))


def _zigzag_block(op: Any, index: Mapping[str, int], *args: Any) -> Resolved:
    """In `step` a rank has the keys of the rank `step` places before it. All of its rows attend to
    the earlier half of those keys, if that is earlier than its own earlier half. If not, its later
    half attends to all of them."""
    *rest, step, length, num_ranks, axis = args
    here = index[axis]
    there = (here - step) % num_ranks
    if _chunk_of(there, num_ranks) < _chunk_of(here, num_ranks):
        return op, (*rest, 0, _low_length(there, length, num_ranks))
    return op, (*rest, _low_length(here, length, num_ranks), length)


def _is_low(rank: int, num_ranks: int) -> bool:
    """Whether a rank keeps the earlier of its two chunks in zig-zag order."""
    return 2 * rank < num_ranks


def _chunk_of(rank: int, num_ranks: int) -> int:
    """The earlier of a rank's two chunks in zig-zag order, of 2 `num_ranks`."""
    return min(2 * rank, 2 * num_ranks - 1 - 2 * rank)


def _low_length(rank: int, length: int, num_ranks: int) -> int:
    """The elements of that chunk. Each rank keeps the first half of its shard of `length`, which is
    the larger one, and gives the second."""
    return length - length // 2 if _is_low(rank, num_ranks) else length // 2


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
