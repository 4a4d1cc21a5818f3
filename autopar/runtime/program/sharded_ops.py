"""What is known of ops on outputs in shards, and what is said of those that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default,
        aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default,
        aten.transpose.int, aten._unsafe_view.default, aten.unsqueeze.default,
        aten.view.default,
    }
)  # fmt: skip
"""Views that shards have, where they leave the dims alone that are cut."""


RESIZED = (
    "what is written into a tensor in shards has the shape {now}, and it stays {was}: take a "
    "result of its own (without out=, x = x.op()), or out= of that shape"
)


OF_A_ROOT = {torch.ops.c10d.gather_.default: 0, torch.ops.c10d.scatter_.default: 1}
"""Collectives with an argument that one rank alone passes, and which it is."""

ALONE = (
    "{op} is given tensors in shards by one rank alone, which the others have to put together with "
    "it: take x = x.full_tensor() on all ranks before"
)


RESHAPED = (
    "{op} took a view of a tensor in shards of shape {was}, which was given another shape in place "
    "since: take views after that, or write x = x.squeeze(0) instead of x.squeeze_(0)"
)


def leaves_mesh(x: Tensor, device: torch.device | None) -> bool:
    """Whether what an op makes of `x` is to be on a device that its mesh is not of: DTensor would
    have it back there at the next op."""
    return device is not None and device.type != x.device.type


def takes_a_part(func: Any, args: Sequence[Any]) -> bool:
    """Whether a view takes a part of a dim that is cut."""
    if func not in (aten.select.int, aten.slice.Tensor):
        return False
    dim = args[1] % args[0].dim() if len(args) > 1 else 0
    return any(p.is_shard(dim) for p in args[0].placements)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are views of one."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
