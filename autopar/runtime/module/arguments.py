"""The leaves of a call's arguments as a program knows them: what it is made for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from autopar.errors import AutoparError, GuardError
from autopar.runtime.process.inputs import InputShard
from autopar.runtime.program.frozen import PLAIN, Freezer
from autopar.runtime.torch_private import is_forward_mode, is_transforming

CONSTANTS = frozenset({*PLAIN, float})
"""Types of arguments that are part of the program, and known by what they print."""


def describe_argument(leaf: Any) -> str:
    """`float32[8, 16]` of a tensor, the value of a constant, the type of anything else."""
    if isinstance(leaf, InputShard):
        return leaf.describe()
    return repr(leaf) if type(leaf) in CONSTANTS else type(leaf).__qualname__


def objects_among(leaves: list[Any]) -> Iterator[Hashable]:
    """The arguments that are neither tensors nor constants, frozen. GuardError for one that holds a
    tensor."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, InputShard) and type(leaf) not in CONSTANTS:
            where = f"argument {position} (a {type(leaf).__qualname__})"
            yield _Argument(where).freeze(leaf, where)


def check_transforms(leaves: Iterable[Any]) -> None:
    """AutoparError inside of a transform of `torch.func`, and where derivatives are on their way
    forward through what a call takes: a program is one node of autograd's, with a backward."""
    if not is_transforming() and (
        not is_forward_mode()
        or all(unpack_dual(x).tangent is None for x in leaves if isinstance(x, Tensor))
    ):
        return
    raise AutoparError(
        "a compiled model gives gradients by backward() and torch.autograd.grad alone: for "
        "torch.func (grad, vmap, jacrev, jvp) and forward-mode derivatives take the plain one, "
        "with model.unsharded() as plain: ..., or do it inside of forward"
    )


class _Argument(Freezer):
    """Freezes an argument. Its tensors would be other ones at each call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def tensor(self, held: Tensor) -> Hashable:
        if self.is_inside_object:
            raise GuardError(
                f"{self._where} holds a tensor where autopar cannot look: pass tensors as "
                "arguments of their own or in tuples, lists and dicts, or register the class with "
                "torch.export.register_dataclass"
            )
        return super().tensor(held)
