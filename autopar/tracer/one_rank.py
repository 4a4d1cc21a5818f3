"""Calls of `torch.distributed` in a forward: what a single rank would see.

A program computes on the global batch. What ranks would sum, gather or send to each other is there
already. So a forward is traced as if its process were the only one: rank 0 of 1. Collectives of all
ranks are then the identity. Collectives of some ranks, and messages between two, have no such
meaning and are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn as autograd
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from autopar.tracer.remedies import Refusal
from autopar.tracer.torch_private import functional_collectives as functional

_SOME_RANKS = (
    "autopar computes on the global batch, and a forward sees one rank: leave out what ranks send "
    "to some others, or do it only without autopar: if not torch.compiler.is_compiling(): ..."
)


class _Done:
    """The result of `async_op=True`, which is done at once."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _stays(tensor: Tensor, *_: Any, **__: Any) -> None:
    """all_reduce, broadcast, reduce: the tensor stays as it is."""


def _gathered(tensors: Sequence[Tensor], tensor: Tensor) -> None:
    tensors[0].copy_(tensor)


def _gathered_objects(objects: list[Any], value: Any) -> None:
    objects[0] = value


def _scattered(output: Tensor, inputs: Tensor | Sequence[Tensor]) -> None:
    output.copy_((inputs if isinstance(inputs, Tensor) else inputs[0]).reshape(output.shape))


IN_PLACE: dict[str, Callable[..., None]] = {
    "all_gather": lambda tensors, tensor, *_, **__: _gathered(tensors, tensor),
    "all_gather_into_tensor": lambda output, tensor, *_, **__: _scattered(output, tensor),
    "all_gather_object": lambda objects, value, *_, **__: _gathered_objects(objects, value),
    "all_reduce": _stays,
    "all_to_all_single": lambda output, tensor, *_, **__: _scattered(output, tensor),
    "barrier": lambda *_, **__: None,
    "broadcast": _stays,
    "reduce": _stays,
    "reduce_scatter": lambda output, tensors, *_, **__: _scattered(output, tensors),
    "reduce_scatter_tensor": lambda output, tensor, *_, **__: _scattered(output, tensor),
}
"""Functions of `torch.distributed`, and what they do on the only rank."""

OUT_OF_PLACE = (
    "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce", "broadcast",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "wait_tensor",
)  # fmt: skip
"""Functional collectives, each of which returns a copy of the tensor."""

DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "all_gather": lambda tensor, *_, **__: (tensor.clone(),),
    "all_reduce": lambda tensor, *_, **__: tensor.clone(),
    "broadcast": lambda tensor, *_, **__: tensor.clone(),
    "reduce": lambda tensor, *_, **__: tensor.clone(),
    "reduce_scatter": lambda output, tensors, *_, **__: tensors[0].clone(),
}
"""Functions of `torch.distributed.nn`."""


def as_only_rank(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of what to replace while `model` is traced. Names that the files of its
    modules have imported are among them."""
    # By identity: the hash of what a module's file has may raise (`Annotated[Tensor, []]`).
    replacements: dict[int, Any] = {}
    for owner, name, value in _all():
        replacements[id(getattr(owner, name))] = value
        yield owner, name, value
    for file in {type(module).__module__: None for module in model.modules()}:
        library = sys.modules.get(file)
        if library is None or file.startswith("torch."):
            continue
        for name, value in list(vars(library).items()):
            if id(value) in replacements:
                yield library, name, replacements[id(value)]


def _all() -> Iterator[tuple[Any, str, Any]]:
    for owner in (dist, c10d):
        for name, work in IN_PLACE.items():
            yield owner, name, _in_place(getattr(owner, name), work)
        yield owner, "get_rank", _message(owner.get_rank, 0)
        yield owner, "get_world_size", _message(owner.get_world_size, 1)
    for name in OUT_OF_PLACE:
        if hasattr(functional, name):
            plain = getattr(functional, name)
            yield functional, name, _of_all_ranks(plain, lambda tensor, *_, **__: tensor.clone())
    for owner in (differentiable, autograd):
        for name, work in DIFFERENTIABLE.items():
            if hasattr(owner, name):
                yield owner, name, _of_all_ranks(getattr(owner, name), work)


def _in_place(plain: Any, work: Callable[..., None]) -> Any:
    def both(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        work(*args, **kwargs)
        return _Done() if async_op else None

    return _of_all_ranks(plain, both)


def _of_all_ranks(plain: Any, work: Callable[..., Any]) -> Any:
    """`work` in the place of `plain`; Refusal if only some ranks take part, or if a rank other than
    0 is named."""
    name = f"{plain.__module__}.{plain.__name__}".replace(".distributed_c10d", "")
    signature = inspect.signature(plain)

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not _is_all(given.get("group")):
            raise Refusal(f"{name} talks to some of the ranks", _SOME_RANKS)
        if any(given.get(key) for key in ("src", "group_src", "dst", "group_dst")):
            raise Refusal(f"{name} names another rank than 0", _SOME_RANKS)
        return work(*args, **kwargs)

    return call


def _message(plain: Any, number: int) -> Any:
    @wraps(plain)
    def call(group: Any = None) -> int:
        return number if _is_all(group) else plain(group)

    return call


def _is_all(group: Any) -> bool:
    """Whether a group, in one of the forms that torch takes, is that of all ranks."""
    world: Any = dist.group.WORLD
    if group is None or group is world:
        return True
    # A rank has a number for a group that it is no member of.
    if world is None or isinstance(group, int):
        return False
    if isinstance(group, str):
        return group == world.group_name
    if isinstance(group, tuple):
        return group[0].size(group[1]) == world.size()
    if isinstance(group, list):
        return group == list(range(world.size()))
    return group.size() == world.size()
