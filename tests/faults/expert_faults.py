"""Faults in the exchange of tokens among experts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.ops import experts_exchange
from autopar.runtime.ops.experts_exchange import _Post
from tests.faults.table import fault, verified

Patch = pytest.MonkeyPatch


def posted(patch: Patch, change: Any) -> None:
    """How rows travel goes through `change`."""
    original = experts_exchange._post

    def changed(*args: Any) -> Generator[Any, Any, _Post]:
        return change((yield from original(*args)))

    patch.setattr(experts_exchange, "_post", changed)


@fault(verified("experts"))
def rows_not_sorted_by_expert(patch: Patch) -> None:
    posted(patch, lambda post: replace(post, order=torch.arange(len(post.order))))


@fault(verified("experts"))
def rows_given_to_the_next_expert(patch: Patch) -> None:
    def shifted(post: _Post) -> _Post:
        counts = torch.diff(post.ends, prepend=post.ends.new_zeros(1))
        return replace(post, ends=counts.roll(1).cumsum(0).to(post.ends.dtype))

    posted(patch, shifted)


@fault(verified("experts"))
def results_sent_back_in_the_order_of_experts(patch: Patch) -> None:
    def unplaced(self: _Post, rows: Tensor) -> Any:
        return (yield experts_exchange.RaggedMessage(rows, self.received, self.sent))

    patch.setattr(_Post, "back", unplaced)


@fault(verified("experts"))
def tokens_that_keep_one_of_their_experts(patch: Patch) -> None:
    """A row is dropped: of the choices of a token the last adds nothing."""
    original = experts_exchange.combine

    def fewer(rows: Tensor, slots: Tensor, chosen: Tensor, dtype: Any) -> Tensor:
        last = (slots % chosen.shape[1] == chosen.shape[1] - 1).unsqueeze(-1)
        return original(rows.masked_fill(last, 0), slots, chosen, dtype)

    patch.setattr(experts_exchange, "combine", fewer)


@fault(verified("experts"))
def gradient_of_the_router_left_with_the_expert(patch: Patch) -> None:
    original = experts_exchange.spread
    patch.setattr(experts_exchange, "spread", lambda *args: original(*args) * 0)
