"""How recurrent layers become one op each, `autopar::recurrent`, while a model is traced: their
steps are not unrolled, and run in the device's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.ops.recurrent import RECURRENT_KINDS, recurrent


def layers(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """torch.lstm, torch.gru and torch.rnn_*: layer by layer, with the dropout between them."""

    def call(*args: Any) -> tuple[Tensor, ...]:
        if len(args) != _ARGUMENTS or not isinstance(args[3], bool):
            return RECURRENT_KINDS[kind](*args)  # of packed sequences, whose lengths are data
        x, state, weights, biased, count, dropout, train, both, batch_first = args
        h, c = state if kind == "lstm" else (state, state.new_empty(0))
        directions = 2 if both else 1
        each = len(weights) // count
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(count):
            x = F.dropout(x, dropout, train) if layer and dropout else x
            own = slice(layer * directions, (layer + 1) * directions)
            begun = (h[own], c[own] if kind == "lstm" else c)
            x, *end = recurrent(kind, x, *begun, weights[layer * each : (layer + 1) * each], biased)
            last.append((end[0], end[1]))
        y = x.transpose(0, 1) if batch_first else x
        states = [torch.cat(ends) if count > 1 else ends[0] for ends in zip(*last, strict=True)]
        return (y, *states) if kind == "lstm" else (y, states[0])

    return call


_ARGUMENTS = 9
"""Of a call on sequences of equal length."""


def cell(kind: str) -> Callable[..., Any]:
    """torch.lstm_cell and its like: a sequence of one step."""

    def call(x: Tensor, state: Any, *weights: Tensor | None) -> Any:
        h, c = state if kind == "lstm" else (state, state.new_empty(0))
        given: Sequence[Tensor] = [w for w in weights if w is not None]
        begun = (h[None], c[None] if kind == "lstm" else c)
        _, h, c = recurrent(kind, x[None], *begun, given, len(given) > _UNBIASED)
        return (h[0], c[0]) if kind == "lstm" else h[0]

    return call


_UNBIASED = 2
"""How many weights a cell without biases has."""

INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: layers("lstm"),
    torch.gru: layers("gru"),
    torch.rnn_tanh: layers("rnn_tanh"),
    torch.rnn_relu: layers("rnn_relu"),
    torch.lstm_cell: cell("lstm"),
    torch.gru_cell: cell("gru"),
    torch.rnn_tanh_cell: cell("rnn_tanh"),
    torch.rnn_relu_cell: cell("rnn_relu"),
}
