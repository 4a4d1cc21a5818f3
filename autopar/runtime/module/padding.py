"""Batches that each rank padded by itself, brought to one length.

Collators pad to the longest row they see, so ranks that load rows of their own may come with
sequences of different lengths. What `transformers` models make of padding is known by the names of
their arguments; so the longest of all ranks decides, and the others pad on, to the right.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_MOST = 16
"""How many arguments may have a length."""
_IGNORED = -100
"""The label that losses of `transformers` leave out."""


def to_one_length(
    model: nn.Module, kwargs: dict[str, Any], exchange: Callable[[Sequence[int]], Tensor]
) -> dict[str, Any]:
    """`kwargs` with sequences, dim 1 of their tensors, as long as on the rank that has the longest.
    `exchange` tells every rank's row of numbers to all.

    They stay as they are where ranks differ in anything else, where no mask would tell a model what
    is padding, or where it is not known what an argument is to be padded with.
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
    uneven = [name for name in names if longest[name] != shortest[name]]
    fills = {name: _fill(name, model) for name in uneven}
    if None in fills.values() or ("input_ids" in fills and "attention_mask" not in fills):
        return kwargs
    return kwargs | {
        name: _padded(kwargs[name], longest[name], fill) for name, fill in fills.items()
    }


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
