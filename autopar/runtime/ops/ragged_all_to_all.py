"""Ops whose ranks send one another numbers of rows that depend on the data, written once for one
process per rank and for all ranks in one process.

Such an op is a generator: it yields a `RaggedMessage`, an all-to-all of rows, and receives the rows
from its peers, until it returns. `with_group` runs it on one rank of a process group; `together`
runs it for all ranks of a group in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor

c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class RaggedMessage:
    """An all-to-all of `rows`: `sent[r]` of them go to rank r of the group, in order, and
    `received[r]` rows come from it."""

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]


RaggedSteps = Generator[RaggedMessage, Tensor, Any]

RAGGED_OPS: dict[Any, Callable[..., RaggedSteps]] = {}
"""By op: the generator of its arguments but the last, which names a process group, or in unbound
graphs a mesh axis."""


def with_group(program: RaggedSteps, group: str) -> Any:
    """What the op returns on this rank of the process group called `group`."""
    message = _next(program, None)
    while isinstance(message, RaggedMessage):
        got = c10d.all_to_all_single(
            message.rows, list(message.received), list(message.sent), group
        )
        message = _next(program, c10d.wait_tensor(got))
    return message


def together(programs: Sequence[RaggedSteps]) -> list[Any]:
    """What the op returns on each rank of a group."""
    messages = [_next(program, None) for program in programs]
    while all(isinstance(message, RaggedMessage) for message in messages):
        messages = [_next(t, got) for t, got in zip(programs, exchanged(messages), strict=True)]
    if any(isinstance(message, RaggedMessage) for message in messages):
        raise AssertionError("some ranks of a group go on sending when others are done")
    return messages


def exchanged(messages: Sequence[RaggedMessage]) -> list[Tensor]:
    """The rows that each rank receives, from the messages of all ranks of a group."""
    parts = [message.rows.split(list(message.sent)) for message in messages]
    return [torch.cat([sent[rank] for sent in parts]) for rank in range(len(messages))]


def _next(program: RaggedSteps, answer: Tensor | None) -> Any:
    """The next message, or what the op returns."""
    try:
        return program.send(answer)  # pyright: ignore[reportArgumentType]
    except StopIteration as done:
        return done.value
