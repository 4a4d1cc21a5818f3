"""Experts and tokens sharded over one group of ranks: `autopar::experts_exchange` and its backward.

A rank has N tokens of its own and E / `ways` of the experts, in order of rank. It sends each
of its rows to the rank that has the expert, which computes the result and sends it back. The number
of rows depends on the data: ranks first exchange how many rows they send to each expert. No row is
dropped. Backward sends the rows again, with their gradients and weights.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.ops.experts import (
    Feed,
    Routing,
    combine,
    empty_expert_gradients,
    empty_tokens,
    gather_rows,
    route,
    spread,
)
from autopar.runtime.ops.gates import Gate
from autopar.runtime.ops.operators import operator
from autopar.runtime.ops.ragged_all_to_all import RAGGED_OPS, RaggedMessage, RaggedSteps, with_group


@dataclass(frozen=True, slots=True)
class _Post:
    """How rows go to the ranks of their experts: `sent[r]` of this rank's rows go to rank r, and
    `received[r]` rows come from it. Row i, sorted by expert, is row `order[i]` of the received
    ones."""

    routing: Routing
    sent: Sequence[int]
    received: Sequence[int]
    order: Tensor
    ends: Tensor

    def there(self, rows: Tensor) -> Generator[RaggedMessage, Tensor, Tensor]:
        """Sends this rank's rows; returns the rows for its experts, sorted by expert."""
        return (yield RaggedMessage(rows, self.sent, self.received))[self.order]

    def back(self, rows: Tensor) -> Generator[RaggedMessage, Tensor, Tensor]:
        """The inverse."""
        placed = torch.empty_like(rows)
        placed[self.order] = rows
        return (yield RaggedMessage(placed, self.received, self.sent))


def _post(chosen: Tensor, here: int, num_ranks: int) -> Generator[RaggedMessage, Tensor, _Post]:
    """The routing among `num_ranks` ranks with `here` experts each."""
    routing = route(chosen, here * num_ranks, may_skip=False)
    counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1))
    theirs = yield RaggedMessage(counts, [here] * num_ranks, [here] * num_ranks)
    sent, received = torch.stack((counts, theirs)).view(2, num_ranks, here).sum(-1).tolist()
    expert = torch.arange(here, device=chosen.device).repeat(num_ranks)
    of_row = expert.repeat_interleave(theirs, output_size=sum(received))
    ends = theirs.view(num_ranks, here).sum(0).cumsum(0).to(torch.int32)
    return _Post(routing, sent, received, torch.sort(of_row, stable=True)[1], ends)


def _forward(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    gate: str, num_ranks: int,
) -> RaggedSteps:  # fmt: skip
    post = yield from _post(chosen, up.shape[0], num_ranks)
    slots = post.routing.slots
    rows = yield from post.there(gather_rows(x, slots, chosen.shape[1]))
    out = Feed(up, down, up_bias, Gate.parse(gate)).forward(rows, post.ends)
    back = yield from post.back(out)
    return combine(back * weights.flatten()[slots].unsqueeze(-1), slots, chosen, x.dtype)


def _backward(
    grad: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, gate: str, num_ranks: int,
) -> RaggedSteps:  # fmt: skip
    post = yield from _post(chosen, up.shape[0], num_ranks)
    slots, choices = post.routing.slots, chosen.shape[1]
    given = (
        gather_rows(grad, slots, choices),
        gather_rows(x, slots, choices),
        weights.flatten()[slots],
    )
    there = yield from post.there(_packed(*given))
    grads, rows, scale = _unpacked(there, *given)
    of_rows, of_weights, *rest = Feed(up, down, up_bias, Gate.parse(gate)).backward(
        grads, scale, rows, post.ends
    )
    back = yield from post.back(_packed(of_rows, of_weights))
    of_rows, of_weights = _unpacked(back, given[1], given[2])
    of_x = combine(of_rows, slots, chosen, x.dtype)
    return of_x, spread(of_weights, slots, chosen), *rest


def _packed(*tensors: Tensor) -> Tensor:
    """Tensors of R rows, of any dtypes, as one of bytes: one message instead of several."""
    rows = len(tensors[0])
    return torch.cat([t.contiguous().view(rows, -1).view(torch.uint8) for t in tensors], 1)


def _unpacked(packed: Tensor, *like: Tensor) -> list[Tensor]:
    """The tensors in `packed`, in dtypes and widths like those of `like`."""
    widths = [prod(t.shape[1:]) * t.element_size() for t in like]
    return [
        columns.contiguous().view(t.dtype).view(len(packed), *t.shape[1:])
        for columns, t in zip(packed.split(widths, 1), like, strict=True)
    ]


@operator(
    "experts_exchange(Tensor x, Tensor chosen, Tensor weights, Tensor up, Tensor down,"
    " Tensor? up_bias, str gate, int ways, str group) -> Tensor"
)
def experts_exchange(*args: Any) -> Tensor:
    """y [N, D] of this rank's tokens, as `autopar::experts` of all tokens and experts of the
    `group` of `ways` ranks gives it."""
    *given, group = args
    return with_group(_forward(*given), group)


@operator(
    "experts_exchange_backward(Tensor grad, Tensor x, Tensor chosen, Tensor weights, Tensor up,"
    " Tensor down, Tensor? up_bias, str gate, int ways, str group)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def experts_exchange_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of this rank's x and weights, and of its experts' up, down and up_bias."""
    *given, group = args
    return with_group(_backward(*given), group)


experts_exchange.register_fake(empty_tokens)
experts_exchange_backward.register_fake(empty_expert_gradients)

RAGGED_OPS[torch.ops.autopar.experts_exchange.default] = _forward
RAGGED_OPS[torch.ops.autopar.experts_exchange_backward.default] = _backward
