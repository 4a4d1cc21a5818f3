"""The states of torch's default generators, of a CPU or a GPU, which all ranks keep as rank 0's."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch import Tensor


def generator_state(device: torch.device) -> Tensor:
    """A copy of the state that the default generator of `device` is in, in the host's memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def go_on_from(state: Tensor, device: torch.device) -> None:
    """The default generator of `device` goes on from `state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def replayed(state: Tensor, device: torch.device) -> Generator[None, None, None]:
    """Inside, the default generator of `device` starts from `state`; outside, it is as if nothing
    was drawn."""
    before = generator_state(device)
    go_on_from(state, device)
    try:
        yield
    finally:
        go_on_from(before, device)


# The default generators of random numbers, which all ranks keep as rank 0's.
#
# A script of one device draws batches, noise and dropout, and a model of it draws too, all from one
# stream. On several ranks with the whole batch each, all ranks draw that stream.

_CPU = torch.device("cpu")
_MOVED = {"cpu": itemgetter(1, 3, -2, -1), "cuda": itemgetter(0, 1)}
"""The words of a state that change as numbers are drawn. On a CPU: how much is left of its block of
numbers, the first of them, and the remaining halves of pairs of normal numbers. Reading all of its
5 kB takes 3 times as long."""
_POSITIVE = (1 << 63) - 1


class Drawing:
    """The default generators of this process: that of the CPU, and of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._devices = (_CPU, device) if device.type == "cuda" else (_CPU,)
        self._read = [
            (each, ctypes.c_int64 * (generator_state(each).numel() // 8), _MOVED[each.type])
            for each in self._devices
        ]

    @property
    def seed(self) -> int:
        """The script's seed, as 63 bits."""
        return torch.initial_seed() & _POSITIVE

    @property
    def place(self) -> int:
        """A digest of how far the generators have come since the seed."""
        digest = 0
        for device, words, moved in self._read:
            state = generator_state(device)
            digest = hash((digest, *moved(words.from_address(state.data_ptr()))))
        return digest

    def states(self) -> bytes:
        """The states of all generators, one after the other."""
        return b"".join(generator_state(each).numpy().tobytes() for each in self._devices)

    def go_on(self, states: bytes) -> None:
        """All generators go on from `states`, as another rank has them."""
        at = 0
        for device in self._devices:
            size = generator_state(device).numel()
            part = bytearray(states[at : at + size])
            go_on_from(torch.frombuffer(part, dtype=torch.uint8), device)
            at += size
