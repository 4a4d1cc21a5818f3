"""A layer of experts as one op: `autopar::experts` and its backward, the same for every device.

`x` [N, D] are tokens. Each goes to the K experts that `chosen` [N, K] (int64) names. The result is
the sum of their outputs, weighted by `weights` [N, K]:

    y[n] = sum over k of weights[n, k] * expert(chosen[n, k], x[n])
    expert(e, x) = down[e] @ gate(up[e] @ x + up_bias[e])

with `up` [E, G, I, D], `down` [E, D, I], `up_bias` [E, G, I] or None, and a gate as in `gates`. G
is 2 for a gated product, otherwise 1. With `may_skip`, choices outside of 0..E-1 are allowed and
add nothing. Without it, the host need not synchronise to get the number of rows.

No token is dropped. A *slot* is one of the N * K choices; the rows of slots are sorted by expert.
Backward recomputes up and the gate: their results, K * G * I values a token, are not saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.ops.gates import Gate
from autopar.runtime.ops.operators import operator

_ONES = 8
"""Columns of ones that sum rows: whole 16 bytes in bfloat16, as the grouped kernel requires."""


@dataclass(frozen=True, slots=True)
class Routing:
    """`slots` [R]: the slot of every row, rows sorted by expert; `ends` [E]: where the rows of each
    expert end."""

    slots: Tensor
    ends: Tensor


def route(chosen: Tensor, num_experts: int, *, may_skip: bool) -> Routing:
    """The routing of `chosen` [N, K] to `num_experts` experts; see the module for `may_skip`."""
    flat = chosen.flatten()
    if may_skip:
        flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, slots = torch.sort(flat, stable=True)
    experts = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(ordered, experts, right=True).to(torch.int32)
    return Routing(slots[: int(ends[-1])] if may_skip else slots, ends)


@dataclass(frozen=True, slots=True)
class Feed:
    """The two projections of some experts, for rows sorted by expert."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    gate: Gate

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[R, D] of `rows` [R, D]."""
        return grouped_linear(self.gate(self._hidden(rows, ends)), self.down, ends)

    def backward(
        self, grad: Tensor, weights: Tensor, rows: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of (rows, weights, up, down, up_bias). `weights` [R] weight each row of the
        output, and `grad` [R, D] is the gradient of the weighted rows."""
        hidden = self._hidden(rows, ends)
        active = self.gate(hidden)
        through = grouped_linear(grad, self.down.transpose(1, 2), ends)
        of_weights = (through * active).sum(-1, dtype=weights.dtype)
        scale = weights.unsqueeze(-1)
        of_hidden = self.gate.backward((through * scale).to(grad.dtype), hidden)
        of_down = grouped_outer((grad * scale).to(grad.dtype), active, ends)
        flat = self._flat(of_hidden)
        of_up = self._unflat(grouped_outer(flat, rows, ends))
        of_rows = grouped_linear(flat, self._up().transpose(1, 2), ends)
        if self.up_bias is None:
            return of_rows, of_weights, of_up, of_down, _nothing(rows)
        ones = rows.new_ones(rows.shape[0], _ONES)
        summed = grouped_outer(of_hidden.flatten(1), ones, ends)[..., 0].contiguous()
        return of_rows, of_weights, of_up, of_down, summed.unflatten(1, self.up_bias.shape[1:])

    def _hidden(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[R, G, I]."""
        hidden = self._unflat(grouped_linear(rows, self._up(), ends))
        if self.up_bias is None:
            return hidden
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return hidden + self.up_bias.repeat_interleave(counts, 0, output_size=rows.shape[0])

    def _up(self) -> Tensor:
        """`up` as [E, G * I, D] or, where it lies so in memory, [E, I * G, D]."""
        return (self.up.transpose(1, 2) if _interleaved(self.up) else self.up).flatten(1, 2)

    def _flat(self, hidden: Tensor) -> Tensor:
        """[R, G, I] with columns as the rows of `_up`."""
        return (hidden.transpose(1, 2) if _interleaved(self.up) else hidden).flatten(1)

    def _unflat(self, of_up: Tensor) -> Tensor:
        """The inverse of `_flat`, and of `_up`."""
        _, gates, inner, _ = self.up.shape
        if _interleaved(self.up):
            return of_up.unflatten(1, (inner, gates)).transpose(1, 2)
        return of_up.unflatten(1, (gates, inner))


def _interleaved(up: Tensor) -> bool:
    return up.shape[1] > 1 and up.stride(1) < up.stride(2)


def _nothing(x: Tensor) -> Tensor:
    """Stands for the gradient of a bias that is not there."""
    return x.new_empty(0)


def gather_rows(x: Tensor, slots: Tensor, choices: int) -> Tensor:
    """The rows of `slots`, which are `choices` per token, from tokens [N, D]."""
    return x[slots // choices]


def combine(rows: Tensor, slots: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, D] in `dtype`: the sum of the rows of every token, slots without a row being zero."""
    count = chosen.numel()
    allocate = rows.new_empty if len(slots) == count else rows.new_zeros
    placed = allocate(count, *rows.shape[1:])
    placed[slots] = rows
    return placed.unflatten(0, chosen.shape).sum(1).to(dtype)


def spread(values: Tensor, slots: Tensor, chosen: Tensor) -> Tensor:
    """[N, K] of one value per row, slots without a row being zero."""
    return values.new_zeros(chosen.numel()).index_copy(0, slots, values).view(chosen.shape)


@operator(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor up, Tensor down, Tensor? up_bias,"
    " str gate, bool may_skip) -> Tensor"
)
def experts_op(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    gate: str,
    may_skip: bool,
) -> Tensor:
    """y [N, D] in the dtype of `x`."""
    routing = route(chosen, up.shape[0], may_skip=may_skip)
    rows = gather_rows(x, routing.slots, chosen.shape[1])
    out = Feed(up, down, up_bias, Gate.parse(gate)).forward(rows, routing.ends)
    weighted = out * weights.flatten()[routing.slots].unsqueeze(-1)
    return combine(weighted, routing.slots, chosen, x.dtype)


@operator(
    "experts_backward(Tensor grad, Tensor x, Tensor chosen, Tensor weights, Tensor up, Tensor down,"
    " Tensor? up_bias, str gate, bool may_skip) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def experts_backward(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    gate: str,
    may_skip: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weights, up, down and up_bias (empty where there is none)."""
    routing = route(chosen, up.shape[0], may_skip=may_skip)
    rows, grads = (gather_rows(t, routing.slots, chosen.shape[1]) for t in (x, grad))
    of_rows, of_weights, *rest = Feed(up, down, up_bias, Gate.parse(gate)).backward(
        grads, weights.flatten()[routing.slots], rows, routing.ends
    )
    of_x = combine(of_rows, routing.slots, chosen, x.dtype)
    return of_x, spread(of_weights, routing.slots, chosen), *rest  # pyright: ignore[reportReturnType]


@experts_op.register_fake
def empty_tokens(x: Tensor, *_rest: Any) -> Tensor:
    """An empty y."""
    return x.new_empty(x.shape)


@experts_backward.register_fake
def empty_expert_gradients(
    _grad: Tensor, x: Tensor, _chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, *_rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty gradients of x, weights, up, down and up_bias."""
    count, gates, inner, width = up.shape
    of_up = (
        up.new_empty(count, inner, gates, width).transpose(1, 2)
        if _interleaved(up)
        else up.new_empty(up.shape)
    )
    bias = _nothing(x) if up_bias is None else up_bias.new_empty(up_bias.shape)
    of_weights = weights.new_empty(weights.shape)
    return x.new_empty(x.shape), of_weights, of_up, down.new_empty(down.shape), bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.gate, ctx.may_skip = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = experts_backward(grad, *ctx.saved_tensors, ctx.gate, ctx.may_skip)
    of_x, *others, of_bias = gradients
    bias = None if ctx.saved_tensors[-1] is None else of_bias
    return of_x, None, *others, bias, None, None


experts_op.register_autograd(_differentiate, setup_context=_save)
experts_backward.refuse_autograd()


_ALIGNED_BYTES = 16


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[R, O] of `rows` [R, C], each times its group's part of `weight` [E, O, C], transposed. There
    must be no rows after the last end."""
    if _has_kernel(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for group, (start, end) in enumerate(_spans(ends)):
        if end > start:
            torch.mm(rows[start:end], weight[group].t(), out=out[start:end])
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[E, O, C]: per group, `left` [R, O] transposed times `right` [R, C]."""
    if _has_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, (start, end) in enumerate(_spans(ends)):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=out[group])
    return out


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Whether the grouped kernel takes these: bfloat16, one dim dense, the other in whole steps of
    16 bytes."""
    return (
        rows.device.type == "cuda"
        and rows.dtype == other.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[0] > 0
        and _aligned(rows)
        and _aligned(other)
    )


def _aligned(x: Tensor) -> bool:
    dense = x.stride(-1) == 1 or x.stride(-2) == 1
    steps = [s for s in x.stride() if s != 1]
    at = x.data_ptr() % _ALIGNED_BYTES == 0
    return dense and at and all(s * x.element_size() % _ALIGNED_BYTES == 0 for s in steps)
