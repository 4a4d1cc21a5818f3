"""Ops of autopar's own, registered with torch's dispatcher.

A kernel is called directly. `torch.library.custom_op` does more around every call: it unpacks the
arguments and looks for results that share memory with them. On a host with 8 us per launch that
takes 64 us. A call here takes 10 us, and 44 us for an op with a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

_R = TypeVar("_R")

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


class Operator(Generic[_R]):
    """The op `autopar::name`, by its `schema`, which begins with the name. If there is nothing else
    in it, the rest is inferred from the annotations of `run`, which computes the op on every
    device."""

    def __init__(self, schema: str, run: Callable[..., _R], tags: Sequence[torch.Tag] = ()) -> None:
        self.name, paren, _ = schema.partition("(")
        if not paren:
            schema += torch.library.infer_schema(run, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(self.name, run, "CompositeExplicitAutograd")
        packet, _, overload = self.name.partition(".")
        self.op: Any = getattr(getattr(torch.ops.autopar, packet), overload or "default")
        """As it stands in graphs."""
        _FUNCTIONS[self.op] = run

    def __call__(self, *args: Any, **kwargs: Any) -> _R:
        """Through the dispatcher: autograd records it, and modes see it."""
        return self.op(*args, **kwargs)

    def register_fake(self, fake: Callable[..., _R]) -> Callable[..., _R]:
        """`fake` returns what the op does, without values."""
        torch.library.register_fake(f"autopar::{self.name}", fake, lib=_LIBRARY)
        return fake

    def register_autograd(
        self, differentiate: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """What `torch.library.register_autograd` takes."""
        torch.library.register_autograd(
            f"autopar::{self.name}", differentiate, setup_context=setup_context, lib=_LIBRARY
        )

    def refuse_autograd(self) -> None:
        """NotImplementedError if a gradient goes through: torch would warn, and leave it out."""

        def refuse(*_: Any) -> None:
            raise NotImplementedError(f"autopar::{self.name} has no derivative")

        self.register_autograd(refuse, lambda *_, **__: None)


def operator(schema: str) -> Callable[[Callable[..., _R]], Operator[_R]]:
    """Makes a function an op (`Operator`)."""
    return lambda run: Operator(schema, run)


def function_of(op: Any) -> Callable[..., Any] | None:
    """The function of an op of autopar's. None for other ops, for those that change their inputs,
    which the dispatcher has to know, and for those that draw, since graphs are searched for
    them."""
    function = _FUNCTIONS.get(op)
    is_left = function is None or op._schema.is_mutable
    return None if is_left or torch.Tag.nondeterministic_seeded in op.tags else function
