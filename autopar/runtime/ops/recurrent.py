"""A recurrent layer as one op: `autopar::recurrent` and its backward, the same for every device.

`x` [T, N, I] is a sequence of T steps. `h` [D, N, P] and, for an LSTM, `c` [D, N, H] are the
initial states of each of D directions (`c` is empty otherwise). `weights` are torch's, one
direction after the other: [G * H, I], [G * H, P], two biases if there are any, the projection if
there is one. The results are y [T, N, D * P] and the last states.

Each device's own kernel runs forward. Backward recomputes forward and differentiates that, so that
only the op's inputs are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.ops.operators import operator
from autopar.runtime.torch_private import differentiating

RECURRENT_KINDS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def _computed(
    kind: str,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    biased: bool,
    *,
    train: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, c) of one layer; with `train`, cuDNN saves what its backward needs."""
    state: Any = [h, c] if kind == "lstm" else h
    both = h.shape[0] == 2
    y, last, *cell = RECURRENT_KINDS[kind](x, state, weights, biased, 1, 0.0, train, both, False)
    return y, last, cell[0] if cell else c.new_empty(c.shape)


@operator(
    "recurrent(str kind, Tensor x, Tensor h, Tensor c, Tensor[] weights, bool biased)"
    " -> (Tensor, Tensor, Tensor)"
)
def recurrent(
    kind: str, x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, c) of one layer of `kind`."""
    y, last, cell = _computed(kind, x, h, c, weights, biased)
    return y.contiguous(), last.contiguous(), cell.contiguous()


@operator(
    "recurrent_backward(str kind, Tensor grad_y, Tensor grad_h, Tensor grad_c, Tensor x,"
    " Tensor h, Tensor c, Tensor[] weights, bool biased) -> Tensor[]"
)
def recurrent_backward(
    kind: str,
    grad_y: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    biased: bool,
) -> list[Tensor]:
    """The gradients of x, h, c and every weight."""
    inputs = [tensor.detach().requires_grad_() for tensor in (x, h, c, *weights)]
    with differentiating():
        first, hidden, cell, *rest = inputs
        outputs = _computed(kind, first, hidden, cell, rest, biased, train=True)
    ends = 3 if kind == "lstm" else 2
    grads = torch.autograd.grad(
        outputs[:ends], inputs, (grad_y, grad_h, grad_c)[:ends], allow_unused=True
    )
    return [
        torch.zeros_like(x) if grad is None else grad.contiguous()
        for x, grad in zip(inputs, grads, strict=True)
    ]


@recurrent.register_fake
def _(
    kind: str, x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:2], h.shape[0] * h.shape[2]))
    return y, h.new_empty(h.shape), c.new_empty(c.shape)


@recurrent_backward.register_fake
def _(kind: str, grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, *inputs: Any) -> list[Tensor]:
    x, h, c, weights, _biased = inputs
    return [tensor.new_empty(tensor.shape) for tensor in (x, h, c, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.kind, x, h, c, weights, ctx.biased = inputs
    ctx.save_for_backward(x, h, c, *weights)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, h, c, *weights = ctx.saved_tensors
    input_grads = recurrent_backward(ctx.kind, *grads, x, h, c, weights, ctx.biased)
    return None, *input_grads[:3], input_grads[3:], None


recurrent.register_autograd(_differentiate, setup_context=_save)
recurrent_backward.refuse_autograd()
