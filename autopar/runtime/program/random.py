"""Random numbers that are the same on every rank.

Ops that draw random numbers run whole on every rank, and must draw the same there. With global
inputs, the default generators of all ranks have the same state (`generators`), and programs draw
from these. With local inputs, each rank's default generator is its own. Programs draw from a
separate state, which starts as rank 0's default generator was at the first call.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import fx

from autopar.runtime.generators import generator_state, go_on_from, replayed
from autopar.runtime.process.own_group import own_group


class DefaultRandom:
    """The default generator of `device`, which is that of one process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> torch.Tensor:
        """The state that the next program starts from."""
        return generator_state(self.device)

    def drawn_from(self) -> AbstractContextManager[None]:
        """Inside, the default generator is this one."""
        return nullcontext()

    def replayed(self, state: torch.Tensor) -> AbstractContextManager[None]:
        """Inside, the default generator starts from `state`; outside, it is as if nothing was
        drawn."""
        return replayed(state, self.device)

    def go_on_from(self, state: torch.Tensor) -> None:
        """The default generator goes on from `state`."""
        go_on_from(state, self.device)


class RandomOfRank0(DefaultRandom):
    """Rank 0's default generator, which goes on as it would alone; that of another `rank` stays as
    it was. Each state is sent to all ranks, which start and draw together."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device)
        self._rank = rank

    def now(self) -> torch.Tensor:
        """The state of rank 0. A collective call."""
        state = super().now().to(self.device)
        dist.broadcast(state, src=0, group=own_group())
        return state.cpu()

    @contextmanager
    def drawn_from(self) -> Generator[None, None, None]:
        """Inside, the default generator is that of rank 0. A collective call."""
        before = super().now()
        self.go_on_from(self.now())
        try:
            yield
        finally:
            if self._rank != 0:
                self.go_on_from(before)


class SharedRandom(DefaultRandom):
    """The generator state of a compiled model's programs on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._state: torch.Tensor | None = None

    @property
    def is_set(self) -> bool:
        return self._state is not None

    def default(self) -> bytes:
        """The state of this process's default generator."""
        return super().now().numpy().tobytes()

    def set(self, state: bytes) -> None:
        """Start from `state`, as `default` returns it on rank 0."""
        self._state = torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def now(self) -> torch.Tensor:
        if self._state is None:
            raise RuntimeError("a random program runs before the ranks share a generator state")
        return self._state

    @contextmanager
    def drawn_from(self) -> Generator[None, None, None]:
        """Inside, the default generator is this one; outside, it is as if nothing was drawn."""
        with self.replayed(self.now()):
            yield
            self._state = super().now()


def draws(gm: fx.GraphModule) -> bool:
    """Whether an op of the graph draws random numbers."""
    return any(map(is_random, gm.graph.nodes))


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
