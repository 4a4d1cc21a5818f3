"""What stands in unbound graphs for ops that depend on the rank, and what each is on one rank.

Rows are elements along a dim of `size` rows that mesh axes cut into chunks, in turn: `cuts` has the
(name, ranks) of those axes, outermost first, and `uneven.held` says what is whose. Nothing calls
these functions: `codegen.bind` puts ATen ops in their place, and `spmd` runs those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor

import autopar.runtime.ops.attention_shard  # noqa: F401 - registers its ops
from autopar.ir.uneven import chunk_length, held

aten = torch.ops.aten

Cuts = tuple[tuple[str, int], ...]
Resolved = tuple[Any, tuple[Any, ...]]
"""An op, and its arguments behind the first one, a tensor."""

CutShard = tuple[int, Cuts, int]
"""(length, cuts, back): a dim is cut into pieces of `length` by the axes of `cuts`; the piece is
the one `back` places before this rank's, the last one being before the first."""


def local_chunk(x: Tensor, dim: int, length: int, axis: str) -> Tensor:
    """The piece of `length` elements of `x` along `dim` that belongs to this rank's index on mesh
    axis `axis`."""
    raise NotImplementedError(f"local_chunk along axis {axis!r} of a graph that is not bound")


def local_position(indices: Tensor, length: int, path: Cuts) -> Tensor:
    """`indices` into a dim, counted from where this rank's piece of `length` elements begins. The
    dim is cut along the axes of `path`, (name, size) each, outermost first."""
    raise NotImplementedError(f"local_position along axes {path} of a graph that is not bound")


def permute(x: Tensor, length: int, num_ranks: int, axis: str) -> Tensor:
    """What the rank before this one on mesh axis `axis`, of `num_ranks` ranks, has for `x`, a list
    of `length` elements; the last rank is before the first."""
    raise NotImplementedError(f"permute along axis {axis!r} of a graph that is not bound")


def attention_shard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    queries: CutShard,
    keys: CutShard,
) -> tuple[Tensor, Tensor]:
    """Causal attention, where `q` is a piece of the sequence, and `k` and `v` are another one."""
    raise NotImplementedError("attention_piece of a graph that is not bound")


def attention_shard_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float | None,
    queries: CutShard,
    keys: CutShard,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward."""
    raise NotImplementedError("attention_piece_backward of a graph that is not bound")


def own_rows(x: Tensor, dim: int, size: int, cuts: Cuts) -> Tensor:
    """The rows of this rank along `dim` of `x`, which has those left by all `cuts` but the last."""
    raise NotImplementedError(f"own_rows of dim {dim} of a graph that is not bound")


def first_rows(x: Tensor, size: int, cuts: Cuts) -> Tensor:
    """As many rows from the start of dim 0 of `x` as this rank has after `cuts`."""
    raise NotImplementedError(f"first_rows of {size} of a graph that is not bound")


def padded_shard(x: Tensor, num_dims: int, size: int, cuts: Cuts) -> Tensor:
    """`x`, of `num_dims` dims, which has the rows of this rank along dim 0, with zeros behind them:
    as many rows as the largest chunk of the last cut has, and one at least."""
    raise NotImplementedError(f"padded_piece of {size} of a graph that is not bound")


def padded_whole(x: Tensor, num_dims: int, size: int, cuts: Cuts) -> Tensor:
    """`x`, of `num_dims` dims, which along dim 0 has the rows left by all `cuts` but the last, with
    zeros behind them: the last one cuts it in pieces as long as those of `padded_shard`."""
    raise NotImplementedError(f"padded_whole of {size} of a graph that is not bound")


def _local_chunk(index: Mapping[str, int], dim: int, length: int, axis: str) -> Resolved:
    start = index[axis] * length
    return aten.slice.Tensor, (dim, start, start + length)


def _local_position(index: Mapping[str, int], length: int, path: Cuts) -> Resolved:
    return aten.sub.Scalar, (_start(index, (length, path, 0)),)


def _start(index: Mapping[str, int], shard: CutShard) -> int:
    """Where a piece begins."""
    length, cuts, back = shard
    at, count = 0, 1
    for axis, ways in cuts:
        at, count = at * ways + index[axis], count * ways
    return (at - back) % count * length


def _permute(index: Mapping[str, int], length: int, num_ranks: int, axis: str) -> Resolved:
    here = index[axis]
    gets, gives = ([0] * num_ranks for _ in range(2))
    gets[(here - 1) % num_ranks] = gives[(here + 1) % num_ranks] = length
    return torch.ops._c10d_functional.all_to_all_single.default, (gets, gives, axis)


def _attention(op: str, index: Mapping[str, int], *args: Any) -> Resolved:
    *rest, queries, keys = args
    starts = _start(index, queries), _start(index, keys)
    return getattr(torch.ops.autopar, op).default, (*rest, *starts)


def _own_rows(index: Mapping[str, int], dim: int, size: int, cuts: Cuts) -> Resolved:
    axis, ways = cuts[-1]
    start, length = held(_length(index, size, cuts[:-1]), [(ways, index[axis])])
    return aten.slice.Tensor, (dim, start, start + length)


def _first_rows(index: Mapping[str, int], size: int, cuts: Cuts) -> Resolved:
    return aten.slice.Tensor, (0, 0, _length(index, size, cuts))


def _padded_shard(index: Mapping[str, int], num_dims: int, size: int, cuts: Cuts) -> Resolved:
    return _padded(num_dims, _length(index, size, cuts), _chunk(index, size, cuts))


def _padded_whole(index: Mapping[str, int], num_dims: int, size: int, cuts: Cuts) -> Resolved:
    have, (_, ways) = _length(index, size, cuts[:-1]), cuts[-1]
    return _padded(num_dims, have, ways * _chunk(index, size, cuts))


def _padded(num_dims: int, have: int, want: int) -> Resolved:
    if have == want:
        return aten.contiguous.default, ()
    return aten.constant_pad_nd.default, ([0, 0] * (num_dims - 1) + [0, want - have],)


def _length(index: Mapping[str, int], size: int, cuts: Cuts) -> int:
    """Rows of this rank after `cuts`."""
    return held(size, [(ways, index[axis]) for axis, ways in cuts])[1]


def _chunk(index: Mapping[str, int], size: int, cuts: Cuts) -> int:
    """Rows of each padded piece of the last cut."""
    return max(1, chunk_length(_length(index, size, cuts[:-1]), cuts[-1][1]))


_ON_A_RANK: dict[Any, Callable[..., Resolved]] = {
    local_chunk: _local_chunk,
    local_position: _local_position,
    permute: _permute,
    attention_shard: partial(_attention, "sdpa_shard"),
    attention_shard_backward: partial(_attention, "sdpa_shard_backward"),
    own_rows: _own_rows,
    first_rows: _first_rows,
    padded_shard: _padded_shard,
    padded_whole: _padded_whole,
}
SYMBOLS = frozenset(_ON_A_RANK)


def on_rank(symbol: Any, args: Sequence[Any], index: Mapping[str, int]) -> Resolved:
    """What `symbol` is, with `args` behind the first one, on the rank whose index on each mesh axis
    is given."""
    return _ON_A_RANK[symbol](index, *args)
