"""The default generators of random numbers, which all ranks keep as rank 0's.

A script of one device draws batches, noise and dropout, and a model of it draws too, all from one
stream. On several ranks with the whole batch each, all ranks draw that stream.
"""

from __future__ import annotations

import ctypes
import zlib

import torch

from autopar.runtime.generators import generator_state, go_on_from

_CPU = torch.device("cpu")
_ENDS_BYTES = 40
"""As much of either end of a CPU generator's state changes with what is drawn: how much there is
of its block of numbers, the first of them, and the half of a pair of normal numbers that is left.
All 5 kB of it take twice as long to read."""
_POSITIVE = (1 << 63) - 1


class Drawing:
    """The default generators of this process: that of the CPU, and of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._devices = (_CPU,) if device.type == "cpu" else (_CPU, device)

    @property
    def seed(self) -> int:
        """What the script has seeded with, as 63 bits."""
        return torch.initial_seed() & _POSITIVE

    @property
    def place(self) -> int:
        """A number for how far the generators have come from there."""
        found = 0
        for device in self._devices:
            state = generator_state(device)
            at, size = state.data_ptr(), state.numel()
            ends = min(size, _ENDS_BYTES)
            found = zlib.crc32(ctypes.string_at(at, ends), found)
            found = zlib.crc32(ctypes.string_at(at + size - ends, ends), found)
        return found

    def states(self) -> bytes:
        """Those that all generators are in."""
        return b"".join(generator_state(each).numpy().tobytes() for each in self._devices)

    def go_on(self, states: bytes) -> None:
        """All generators go on from `states`, as another rank has them."""
        at = 0
        for device in self._devices:
            size = generator_state(device).numel()
            part = bytearray(states[at : at + size])
            go_on_from(torch.frombuffer(part, dtype=torch.uint8), device)
            at += size
