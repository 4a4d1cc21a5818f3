"""Ops that one rank runs alone, as in `if rank == 0: print(w.norm())`.

Tensors in shards are read by collectives, in which all ranks take part. Before that, ranks compare
what they are about to read. If it is the same, they read it together. If others do something else,
a rank reads alone: it requests the shards from their threads (`reading`), and computes from whole
tensors. That is exact for parameters, gradients, states of optimizers and outputs, and for tensors
computed from these (`origins`). For other tensors, or if a rank alone would change a shared tensor,
it is an error with the line.

A place of the script where all ranks have read together a few times is trusted. There they go on
without a check, and compare at the next call how often they have been there.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import shard_of
from autopar.runtime.process.origins import Leaf, Origin, recomputed, source_of
from autopar.runtime.process.part_tensors import is_of_some_ranks
from autopar.runtime.process.pre_step_check import ALL, ALONE, PreStepCheck
from autopar.runtime.process.reading import Reader, start_reading
from autopar.runtime.process.stack_lines import is_of_script
from autopar.runtime.process.world import World
from autopar.runtime.torch_private import in_backward

_TRUSTED = 3
"""How often all ranks have to read together at a place of the script before it is trusted."""

_UNKNOWN = (
    "{op} is called by rank {rank} alone{line}, for a tensor of which other ranks hold shards. It "
    "is no parameter, gradient (before the optimizer's step), state or output of a compiled model "
    "as it is now, nor made of these by ops on single tensors: make the call on all ranks, or "
    "x = x.full_tensor() on all before"
)
_CHANGES = (
    "{op} is called by rank {rank} alone{line}, and would change or draw a tensor of which other "
    "ranks hold shards: make the call on all ranks"
)
_BACKWARD = (
    "backward is called by rank {rank} alone{line}, and {op} in it needs gradients that other "
    "ranks hold shards of: compute the loss, and call backward, on all ranks"
)


@dataclass
class _Here:
    """This process's state of joint and lone reads."""

    pre_step_check: PreStepCheck
    reader: Reader
    thread: int
    """The id of the thread that calls models. Others, such as a logger's, read alone."""
    joint: Counter[int] = field(default_factory=Counter)
    trusted: dict[int, int] = field(default_factory=dict)
    """Digests of the places where all ranks read together, by place."""
    alone: set[int] = field(default_factory=set)
    """The places where this rank alone does."""


_here: list[_Here] = []


class _Inside(threading.local):
    """Whether this thread is inside of an op of all ranks (True), or of this one alone (False)."""

    joint: bool | None = None


_inside = _Inside()


def know_ranks(world: World, model: nn.Module) -> None:
    """From now on single ranks of `world` may read tensors of `model`. A collective call."""
    reader = start_reading(world)
    assert world.pre_step_check is not None
    if not _here or _here[-1].pre_step_check is not world.pre_step_check:
        _here[:] = [_Here(world.pre_step_check, reader, threading.get_ident())]
    if all(known() is not model for known in reader.models):
        reader.models.append(ref(model))
    reader.retained.clear()
    reader.outputs_of.clear()


def know_copy(copied: nn.Module, model: nn.Module) -> None:
    """From now on single ranks may read tensors of `model`, too, inside of a copy of a compiled
    model. It is held until ranks meet without that copy."""
    if _here:
        reader = _here[-1].reader
        reader.models.append(ref(model))
        reader.copies[copied] = model
        reader.held.append(model)


def step_together(optimizer: Optimizer) -> None:
    """Check that all ranks are at a step of `optimizer`, whose states single ranks may read from
    now on."""
    if not _here:
        return
    reader = _here[-1].reader
    if all(known() is not optimizer for known in reader.optimizers):
        reader.optimizers.append(ref(optimizer))
    reader.retained[id(optimizer)] = optimizer
    if dist.is_initialized() and not in_backward():
        _here[-1].pre_step_check.step()
        reader.hold_copies()


def know_output(output: Any) -> None:
    """From now on single ranks may read this output in shards."""
    if _here:
        _here[-1].reader.add_output(output)


def keep_readable(model: nn.Module, outputs: Iterable[Any]) -> None:
    """Hold `model`, and until its next call its `outputs`, for other ranks to read, even if the
    script has released them here. Models are held until another is compiled, copies until ranks
    meet after their release."""
    if _here:
        _here[-1].thread = threading.get_ident()
        reader = _here[-1].reader
        reader.hold_copies()
        if all(known is not model for known in reader.held):
            reader.retained[id(model)] = model
        given = () if torch.is_grad_enabled() else outputs
        reader.outputs_of[model] = [x for x in given if is_in_shards(x)]


@contextmanager
def jointly(op: Any, given: Sequence[Any], *, reads: bool = True) -> Generator[bool]:
    """Inside, all ranks do `op` with the tensors among `given`, some of which are in shards. Or it
    yields False, and this rank alone does it with the tensors of `whole_alone`. AutoparError if
    this rank alone cannot read them, or would change them."""
    before = _inside.joint
    if before is None:
        _inside.joint = not _here or _come(_here[-1], op, given, reads=reads)
    try:
        is_outermost = before is None and _here and _inside.joint
        if is_outermost and (in_backward() or is_differentiated(given)):
            compare_beside(f"what is beside a compiled model's tensors in {op}", given)
        yield bool(_inside.joint)
    finally:
        _inside.joint = before


def compare_beside(where: str, given: Iterable[Any]) -> None:
    """Check, at the next comparison, that plain tensors among `given` are equal on ranks with the
    same batch."""
    if _here:
        _here[-1].pre_step_check.beside.add(where, given)


def is_differentiated(given: Iterable[Any]) -> bool:
    """Whether autograd records ops on these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)


def whole_alone(x: Tensor) -> Tensor:
    """All of a tensor, plain, without a collective; a plain one is itself."""
    return x if type(x) is Tensor else recomputed(source_of(x), _whole)


def is_in_shards(x: Any) -> bool:
    """Whether ranks hold shards of a tensor, or some ranks hold nothing of it."""
    if isinstance(x, DTensor):
        return is_of_some_ranks(x.device_mesh) or not all(p.is_replicate() for p in x.placements)
    return getattr(x, "in_shards", False)


def _whole(x: Tensor | None) -> Tensor:
    assert x is not None
    if not is_in_shards(x):
        return shard_of(x) if isinstance(x, DTensor) else getattr(x, "shard", x)
    reader = _here[-1].reader
    whole = reader.whole(reader.name_of(x), x)
    return whole.to(shard_of(x).device if isinstance(x, DTensor) else x.device)


def _come(here: _Here, op: Any, given: Sequence[Any], *, reads: bool) -> bool:
    """Whether all ranks are here for `op`."""
    site, location = _place_of(op)
    if site in here.trusted:
        here.pre_step_check.read_unasked(here.trusted[site])
        return True
    texts = [_text(source_of(x), here.reader) for x in given if is_in_shards(x)]
    is_known = not any("?" in text for text in texts)
    can_alone = reads and is_known and not in_backward()
    is_elsewhere = threading.get_ident() != here.thread and not in_backward()
    is_apart = is_elsewhere or not dist.is_initialized()
    if can_alone and (is_apart or site in here.alone):
        return False
    line = f"{Path(location[0].co_filename).name}:{location[1]}" if location else ""
    answer = (
        here.pre_step_check.reads(_digest(op, texts, line), can_alone=can_alone)
        if not is_apart
        else ALONE
    )
    if answer == ALL:
        here.joint[site] += 1
        if here.joint[site] == _TRUSTED:
            here.trusted[site] = _digest(op, (), line)
        return True
    if not can_alone:
        text = _BACKWARD if in_backward() else _UNKNOWN if reads else _CHANGES
        where = f", at {line} in {location[0].co_name}" if location else ""
        raise AutoparError(text.format(op=op, rank=here.pre_step_check.rank, line=where))
    if answer == ALONE:
        here.alone.add(site)
    return False


def _text(source: Leaf | Origin, reader: Reader) -> str:
    """A text that is the same on all ranks for tensors computed alike; with a `?` if one is not
    known, or is gone."""
    if isinstance(source, Leaf):
        tensor = source.now()
        if tensor is None:
            return "?"
        kind = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
        return (reader.name_of(tensor) or f"?{kind}") if is_in_shards(tensor) else kind
    given = (*source.args, *source.kwargs.values())
    texts = (
        _text(x, reader)
        if isinstance(x, (Leaf, Origin))
        else type(x).__name__
        if isinstance(x, torch.device | torch.Generator)  # each rank's own
        else str(x)
        for x in given
    )
    return f"{source.op}({', '.join(texts)})"


def _digest(op: Any, texts: Sequence[str], line: str) -> int:
    return zlib.crc32("|".join((str(op), line, *texts)).encode())


def _place_of(op: Any) -> tuple[int, tuple[CodeType, int] | None]:
    """A number for the place of the script where `op` is called, in this process alone, and the
    innermost line of the script there."""
    frame: FrameType | None = sys._getframe(1)
    key, location = hash((id(op), 0)), None
    while frame is not None:
        code = frame.f_code
        key = hash((key, id(code), frame.f_lasti))
        if location is None and _is_of_script(code):
            location = code, frame.f_lineno
        frame = frame.f_back
    return key, location


_is_of_script = cache(is_of_script)
