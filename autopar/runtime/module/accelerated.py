"""A compiled model under accelerate, and so under `transformers.Trainer`.

accelerate passes each rank rows of its own, and expects what `DistributedDataParallel` returns:
outputs for these rows, and the mean over ranks of the gradients of each rank's loss. So the rows of
all ranks, in order of rank, are the batch. A result with a row per row of the batch is returned as
the rank's own rows, and its tangents are averaged. A loss that the model computes is that of the
whole batch, on every rank.

With `num_items_in_batch`, Trainer multiplies the loss by the number of processes, since it expects
shares that add up, not means. So each rank returns an equal share.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.saving import Library
from autopar.runtime.process.own_group import own_group
from autopar.runtime.process.world import World
from autopar.runtime.program.random import DefaultRandom, RandomOfRank0
from autopar.runtime.torch_private import flatten, map_tensors

ITEMS = "num_items_in_batch"
"""The argument in which Trainer passes the number of labels in all batches of a step."""


def mixed_precision() -> torch.dtype | None:
    """The dtype of accelerate's autocast; None for the model's own dtypes.

    AutoparError for float16, whose gradients need a scaler that sees all of them.
    """
    from accelerate.state import AcceleratorState

    kind: str = AcceleratorState().mixed_precision
    if kind == "bf16":
        return torch.bfloat16
    if kind != "no":
        raise AutoparError(
            f"accelerate is to run the compiled model in {kind}, which autopar cannot: take "
            'mixed_precision="bf16" (bf16=True of TrainingArguments) or "no"'
        )
    return None


@dataclass(frozen=True, slots=True)
class Terms:
    """How accelerate uses a compiled model."""

    model: nn.Module
    world: World
    library: Library
    dtype: torch.dtype | None

    def random(self, own: DefaultRandom | None) -> DefaultRandom | None:
        """The generator to draw from: accelerate saves and restores each rank's default one."""
        if own is None or self.world.size == 1:
            return own
        return RandomOfRank0(self.world.device, self.world.rank)

    def autocast(self) -> Any:
        """The context to call the model in."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.dtype)

    def take(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments, with sequences padded to one length on all ranks, and with the mean over
        ranks of `num_items_in_batch`. So ranks that count their own labels train on the mean over
        all, as one process does."""
        if self.world.pre_step_check is not None:
            kwargs = to_one_length(self.model, kwargs, self.world.pre_step_check.exchange)
        if kwargs.get(ITEMS) is None:
            return kwargs
        items = torch.as_tensor(kwargs[ITEMS], device=self.world.device).float()
        if self.world.size > 1:
            items = items.clone()
            dist.all_reduce(items, group=own_group())
            items /= self.world.size
        return {**kwargs, ITEMS: items}

    def give(self, outputs: Any, kwargs: Mapping[str, Any]) -> Any:
        """The model's outputs as accelerate's callers expect them."""
        if self.dtype is not None:
            outputs = map_tensors(lambda x: x.float() if x.dtype == self.dtype else x, outputs)
        if kwargs.get(ITEMS) is None or self.world.size == 1:
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0] / self.world.size, *outputs[1:])
        if outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] / self.world.size
        return outputs


def is_accelerated() -> bool:
    """Whether the script has an `Accelerator`."""
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized()


def accept(model: nn.Module, world: World) -> Terms | None:
    """The terms for a model that accelerate asks about; None if no `Accelerator` is there."""
    if not is_accelerated():
        return None
    return Terms(model, world, Library(model, world), mixed_precision())


_MOST = 16
"""How many arguments may have a length."""
_IGNORED = -100
"""The label that losses of `transformers` leave out."""


def to_one_length(
    model: nn.Module, kwargs: dict[str, Any], exchange: Callable[[Sequence[int]], Tensor]
) -> dict[str, Any]:
    """`kwargs` with sequences, dim 1 of their tensors, padded to the longest of all ranks.
    `exchange` gathers a row of numbers from each rank.

    They are not changed if ranks differ in anything else, if no mask shows the model what is
    padding, or if an argument's padding value is not known.
    """
    names = sorted(name for name, x in kwargs.items() if isinstance(x, Tensor) and x.dim() > 1)
    rest = [(name, str(kwargs[name].dtype), kwargs[name].shape[2:]) for name in names]
    lengths = [kwargs[name].shape[1] for name in names][:_MOST]
    alike = zlib.crc32(repr((rest, len(names) <= _MOST)).encode())
    rows = exchange([alike, *lengths, *[0] * (_MOST - len(lengths))])
    if len(names) > _MOST or (rows[:, 0] != alike).any():
        return kwargs
    longest = dict(zip(names, rows[:, 1:].amax(0).tolist(), strict=False))
    shortest = dict(zip(names, rows[:, 1:].amin(0).tolist(), strict=False))
    fills = {name: _fill(name, model) for name in names if longest[name] != shortest[name]}
    if None in fills.values() or ("input_ids" in fills and "attention_mask" not in fills):
        return kwargs
    return kwargs | {
        name: _padded(kwargs[name], longest[name], fill) for name, fill in fills.items()
    }


def own_lengths(
    kwargs: Mapping[str, Any], padded: Mapping[str, Any], num_before: int
) -> dict[int, int]:
    """The lengths of this rank's sequences, by the positions of the leaves that were `padded`.
    `num_before` leaves stand before those of the keywords, which are in the order of their
    names."""
    lengths: dict[int, int] = {}
    position = num_before
    for name in sorted(padded):
        own, given = kwargs[name], padded[name]
        if isinstance(own, Tensor) and own.dim() > 1 and own.shape[1] != given.shape[1]:
            lengths[position] = own.shape[1]
        position += len(flatten(given)[0])
    return lengths


def _fill(name: str, model: nn.Module) -> int | None:
    """What an argument of this name is padded with; None if that is not known."""
    if name.endswith("labels"):
        return _IGNORED
    if name in ("input_ids", "decoder_input_ids"):
        return getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    is_known = name.endswith("mask") or name in ("token_type_ids", "position_ids", "inputs_embeds")
    return 0 if is_known else None


def _padded(x: Tensor, length: int, fill: int | None) -> Tensor:
    assert fill is not None
    behind = (0, 0) * (x.dim() - 2) + (0, length - x.shape[1])
    return F.pad(x, behind, value=fill)
