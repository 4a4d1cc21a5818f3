"""One parameter in the place of another, wherever Python code has taken hold of it.

A plain parameter cannot become a DTensor and stay the same object: objects of the two classes are
laid out differently in memory. So the new one replaces it in optimizers, their states, and any
lists and mappings. A reference to the old one that is left, in a tuple or in a variable, raises an
error when it is used.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.torch_private import flatten

_NAME = "_autopar_superseded"
_STALE = (
    "parameter {name} was taken from the model before autopar.compile, which stores it as a "
    "DTensor, and is held where it cannot be exchanged (a tuple, a variable, an attribute): take "
    "it from the compiled model, with parameters() or named_parameters(), again"
)


class _Superseded(nn.Parameter):
    """A parameter that another one has replaced."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        stale = [x for x in flatten((args, kwargs))[0] if isinstance(x, _Superseded)]
        name = vars(stale[0])[_NAME] if stale else "of the model"
        raise AutoparError(_STALE.format(name=name))


def supersede(new: Sequence[tuple[str, nn.Parameter, nn.Parameter]]) -> None:
    """For each (name, old, new): the new one replaces the old one in every list and mapping, as an
    item, value or key. Any other use of the old one is an AutoparError."""
    _replace({id(old): param for _, old, param in new})
    for name, old, _ in new:
        if old.requires_grad:
            # An earlier autograd graph leads to it, and its gradient would be lost there.
            torch.autograd.graph.get_gradient_edge(old).node.register_prehook(_refusal(name))
        vars(old)[_NAME] = name
        old.__class__ = _Superseded


def _replace(by_id: Mapping[int, Tensor]) -> None:
    """Looks at types, and calls the methods of list and dict themselves: code of subclasses must
    not run here."""
    for held in gc.get_objects() if by_id else ():
        if issubclass(type(held), list):
            if by_id.keys().isdisjoint(map(id, list.__iter__(held))):
                continue
            for index, item in enumerate(list.__iter__(held)):
                list.__setitem__(held, index, by_id.get(id(item), item))
        elif issubclass(type(held), dict):
            if not by_id.keys().isdisjoint(map(id, dict.values(held))):
                for key, value in dict.items(held):
                    dict.__setitem__(held, key, by_id.get(id(value), value))
            if not by_id.keys().isdisjoint(map(id, dict.keys(held))):
                items = [(by_id.get(id(key), key), value) for key, value in dict.items(held)]
                dict.clear(held)
                dict.update(held, items)


def _refusal(name: str) -> Any:
    def refuse(_: Any) -> NoReturn:
        raise AutoparError(
            f"this backward leads to parameter {name} as it was before autopar.compile: call "
            "backward before the model is compiled, or compute the loss with the compiled model"
        )

    return refuse
