"""The states of torch's default generators, of a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

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
