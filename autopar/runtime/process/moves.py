"""When parameters, gradients and states of optimizers change."""

from __future__ import annotations

import torch
from torch import Tensor


class Moves:
    """How often parameters, gradients or states changed on this rank: odd while they do."""

    def __init__(self) -> None:
        self.count = 0
        self.has_stepped = False
        """Whether an optimizer has stepped since the last backward: a script may drop gradients
        then."""
        self.in_place = 0
        """How often a script changed any of them itself."""
        self._done: torch.cuda.Event | None = None

    @property
    def are_going_on(self) -> bool:
        return self.count % 2 == 1

    def begin(self) -> None:
        self.count |= 1

    def end(self) -> None:
        self.count = (self.count | 1) + 1
        self.mark()

    def step_ends(self) -> None:
        """An optimizer has stepped."""
        self.end()
        self.has_stepped = True

    def backward(self) -> None:
        """Gradients come, once for each program that ran."""
        self.once()
        self.has_stepped = False

    def once(self) -> None:
        """There was one, unless it is a part of one that goes on."""
        if not self.are_going_on:
            self.count += 2

    def mark(self) -> None:
        """What others may read here is what the device has by now been told to make."""
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    def copy(self, shard: Tensor) -> Tensor:
        """`shard` as it is since the last move, on the CPU: on a stream of its own, since the
        default one may wait for the very rank that reads."""
        if not shard.is_cuda:
            return shard.contiguous().clone()
        stream = torch.cuda.Stream(shard.device)
        if self._done is not None:
            stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            return shard.contiguous().cpu()


moves = Moves()
