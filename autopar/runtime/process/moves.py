"""When parameters, gradients and states of optimizers change."""

from __future__ import annotations

import torch
from torch import Tensor


class Moves:
    """Counts changes of parameters, gradients or states on this rank: odd during a change."""

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
        """Gradients have been computed, once for each program that ran."""
        self.once()
        self.has_stepped = False

    def once(self) -> None:
        """Count a change, unless it is part of one that is going on."""
        if not self.are_going_on:
            self.count += 2

    def mark(self) -> None:
        """Other ranks read the values that the device has been queued to compute by now."""
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    def copy(self, shard: Tensor) -> Tensor:
        """`shard` with the values of the last change, copied to the CPU. Uses a stream of its own,
        since the default one may wait for the rank that reads."""
        if not shard.is_cuda:
            return shard.contiguous().clone()
        stream = torch.cuda.Stream(shard.device)
        if self._done is not None:
            stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            return shard.contiguous().cpu()


moves = Moves()
