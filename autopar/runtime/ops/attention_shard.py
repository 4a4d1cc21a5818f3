"""Causal attention of some rows with some columns, for a rank that has a shard of the sequence:
`autopar::sdpa_shard`, `autopar::sdpa_rows` and their backwards.

Tensors are those of `attention.sdpa`. Columns begin at position `first_key` of the sequence. Row s
is at position `first_query + s` and attends to the columns up to there. A row that attends to
nothing has zeros, and -inf in lse. Columns that all rows attend to and the square behind them use
the device's fused kernel each. Their results are merged by lse, after "FlashAttention"
(arXiv:2205.14135), and backward starts from the merged lse. Columns that no row attends to cost
nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.ops.attention import (
    backward_formulas,
    by_position,
    empty_gradients,
    empty_results,
    forward_formulas,
    like_by_position,
    sdpa,
    sdpa_backward,
)
from autopar.runtime.ops.operators import operator

_KEYS = 2


@operator(
    "sdpa_shard(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, int first_query,"
    " int first_key) -> (Tensor, Tensor)"
)
def sdpa_shard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    first_query: int,
    first_key: int,
) -> tuple[Tensor, Tensor]:
    """(attention, lse) of some rows with some columns."""
    past = first_query - first_key
    seen = min(k.shape[_KEYS], past + q.shape[_KEYS])
    if seen <= 0:
        out, lse = empty_results(q, k, v)
        return out.zero_(), lse.fill_(-math.inf)
    k, v = k[:, :, :seen], v[:, :, :seen]
    if mask is not None or past < 0:
        out, lse = forward_formulas(q, k, v, _columns(mask, seen), past, scale)
        return by_position(out), lse.contiguous()
    if past + 1 >= seen:
        return sdpa(q, k, v, None, False, scale)
    if past == 0:
        return sdpa(q, k, v, None, True, scale)
    early = sdpa(q, k[:, :, :past], v[:, :, :past], None, False, scale)
    late = sdpa(q, k[:, :, past:], v[:, :, past:], None, True, scale)
    return _merged(*early, *late)


@operator(
    "sdpa_shard_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, float? scale, int first_query, int first_key) -> (Tensor, Tensor, Tensor)"
)
def sdpa_shard_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float | None,
    first_query: int,
    first_key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values through these columns. `out` and `lse` are those of
    the rows with all columns they attend to, here or on other ranks."""
    past, length = first_query - first_key, k.shape[_KEYS]
    seen = min(length, past + q.shape[_KEYS])
    if seen <= 0:
        dq, dk, dv = (like_by_position(x, x.shape[-1]).zero_() for x in (q, k, v))
        return dq, dk, dv
    k, v = k[:, :, :seen], v[:, :, :seen]
    if mask is not None or past < 0:
        dq, dk, dv = backward_formulas(
            grad_out, q, k, v, out, lse, _columns(mask, seen), past, scale
        )
    elif past + 1 >= seen or past == 0:
        causal = past + 1 < seen
        dq, dk, dv = sdpa_backward(grad_out, q, k, v, out, lse, None, causal, scale)
    else:
        early, late = (
            sdpa_backward(grad_out, q, *columns, out, lse, None, causal, scale)
            for columns, causal in (
                ((k[:, :, :past], v[:, :, :past]), False),
                ((k[:, :, past:], v[:, :, past:]), True),
            )
        )
        dq = early[0] + late[0]
        dk, dv = (torch.cat((a, b), _KEYS) for a, b in zip(early[1:], late[1:], strict=True))
    return by_position(dq), _padded(dk, length), _padded(dv, length)


@operator(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, float? scale, int first_row, int num_keys)"
    " -> (Tensor, Tensor)"
)
def sdpa_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, first_row: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """(attention, lse) of the rows from `first_row` on with the first `num_keys` columns. Rows
    before have zeros, and -inf in lse."""
    if first_row == q.shape[_KEYS] or num_keys == 0:
        out, lse = empty_results(q, k, v)
        return out.zero_(), lse.fill_(-math.inf)
    out, lse = sdpa(q[:, :, first_row:], k[:, :, :num_keys], v[:, :, :num_keys], None, False, scale)
    if first_row == 0:
        return out, lse
    lse = torch.nn.functional.pad(lse, (first_row, 0), value=-math.inf)
    return by_position(torch.nn.functional.pad(out, (0, 0, first_row, 0))), lse


@operator(
    "sdpa_rows_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " float? scale, int first_row, int num_keys) -> (Tensor, Tensor, Tensor)"
)
def sdpa_rows_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    first_row: int,
    num_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values through these rows and columns. `out` and `lse` are
    those of the rows with all columns they attend to, here or on other ranks."""
    length = k.shape[_KEYS]
    if first_row == q.shape[_KEYS] or num_keys == 0:
        dq, dk, dv = (like_by_position(x, x.shape[-1]).zero_() for x in (q, k, v))
        return dq, dk, dv
    rows = (x[:, :, first_row:] for x in (grad_out, q))
    columns = (x[:, :, :num_keys] for x in (k, v))
    results = (x[:, :, first_row:] for x in (out, lse))
    dq, dk, dv = sdpa_backward(*rows, *columns, *results, None, False, scale)
    dq = torch.nn.functional.pad(dq, (0, 0, first_row, 0)) if first_row else dq
    return by_position(dq), _padded(dk, length), _padded(dv, length)


def _columns(mask: Tensor | None, seen: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., :seen]


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results of the same rows with two sets of columns, neither of them empty, as one."""
    total = torch.logaddexp(lse, more_lse)
    parts = (
        each * torch.exp(own - total).unsqueeze(-1) for each, own in ((out, lse), (more, more_lse))
    )
    return by_position(sum(parts).to(out.dtype)), total  # pyright: ignore[reportAttributeAccessIssue]


def _padded(grad: Tensor, length: int) -> Tensor:
    """`grad` with zeros for the columns behind its own."""
    missing = length - grad.shape[_KEYS]
    return by_position(torch.nn.functional.pad(grad, (0, 0, 0, missing)) if missing else grad)


for _results in (sdpa_shard, sdpa_rows):
    _results.register_fake(empty_results)
for _gradients in (sdpa_shard_backward, sdpa_rows_backward):
    _gradients.register_fake(empty_gradients)
