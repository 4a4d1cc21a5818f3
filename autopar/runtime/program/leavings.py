"""Values that forward leaves on a model: numbers, as in eager, and tensors, which do not exist
after a call.

A program computes what forward returns. A number that forward sets (`self.calls += 1`) is set after
each call. A tensor that it leaves in an attribute, a list or a dict is not computed. Between calls
a stand-in is there, whose use is an error. During calls the previous value is there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autopar.errors import AutoparError

_Result = TypeVar("_Result")
MISSING = object()
"""Stands for an attribute that did not exist."""

_LEFT = (
    "{what} is a tensor that forward left there, and a compiled model has what forward returns: "
    "return it beside the rest, as in `return loss, aux`"
)


def value_at(table: Any, name: Any) -> Any:
    """The value at `name` of a dict, a list, a class or a cell ("cell_contents"); or `MISSING`."""
    try:
        if isinstance(table, CellType):
            return table.cell_contents
        return vars(table)[name] if isinstance(table, type) else table[name]
    except (KeyError, IndexError, ValueError):
        return MISSING


def put_at(table: Any, name: Any, value: Any) -> None:
    """Put `value` there, or remove the entry for `MISSING`."""
    if value is MISSING:
        if isinstance(table, dict):
            table.pop(name, None)
    elif isinstance(table, type | CellType):
        setattr(table, name, value)
    else:
        table[name] = value


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """An entry that forward changes: `name` of `table`, which is the `vars` of a module, a list, or
    another place of `value_at`. `value` is its new value, with a `LeftTensor` for each tensor. If
    `adds`, it is added to the current value, or else to `default`. If `passes`, the previous value
    is there during calls. If the list or dict `held` is changed in place, it stays the same
    object."""

    table: Any
    name: Any
    value: Any
    adds: bool = False
    passes: bool = False
    held: Any = None
    default: Any = MISSING

    def look(self) -> Any:
        """The current value."""
        return self.held.copy() if self.held is not None else value_at(self.table, self.name)

    def put(self, value: Any) -> None:
        """Make `value` the current value."""
        if self.held is not None:
            self.held.clear()
            self.held.extend(value) if isinstance(self.held, list) else self.held.update(value)
        else:
            put_at(self.table, self.name, value)

    def is_there(self) -> bool:
        """Whether `value` is still there, and the script has not replaced it."""
        now = self.look()
        if self.held is None:
            return now is self.value
        own, others = (list(x.values() if isinstance(x, Mapping) else x) for x in (now, self.value))
        return len(own) == len(others) and all(map(operator.is_, own, others))


class LeftTensor(Tensor):
    """Stands for a tensor that forward left, and that exists in forward alone."""

    what: str

    @staticmethod
    def __new__(cls, what: str) -> LeftTensor:
        tensor: LeftTensor = torch.empty(0, device="meta").as_subclass(cls)
        tensor.what = what
        return tensor

    def __init__(self, what: str) -> None:
        """All is done where it is made."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        flat = [y for x in given for y in (x if isinstance(x, (list, tuple)) else (x,))]
        left = next((x for x in flat if isinstance(x, LeftTensor)), None)
        what = vars(left)["what"] if left is not None else "this"
        raise AutoparError(_LEFT.format(what=what))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{vars(self)['what']}: a tensor that only forward has>"

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftTensor:
        return LeftTensor(vars(self)["what"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LeftTensor, (vars(self)["what"],)


class Leavings:
    """The values left by the last call of a model. Models may leave tensors in the same place:
    stand-ins are removed for calls of any model, and put back after them."""

    def __init__(self) -> None:
        _left[self] = []

    def enter(self) -> None:
        """A call begins: put back previous values, unless the script has replaced the stand-ins."""
        for passing in _left.values():
            passing[:] = [each for each in passing if each[0].is_there()]
            for leaving, before in reversed(passing):
                leaving.put(before)

    @staticmethod
    def rerun(
        leavings: Sequence[LeftBehind], function: Callable[..., _Result]
    ) -> Callable[..., _Result]:
        """`function`, run with the values that are now where a call leaves `leavings`."""
        before = [(each, each.look()) for each in leavings]

        def run(*args: Any) -> _Result:
            now = [(each, each.look()) for each, _ in before]
            try:
                for leaving, value in before:
                    leaving.put(value)
                return function(*args)
            finally:
                for leaving, value in now:
                    leaving.put(value)

        return run

    def leave(self, leavings: Sequence[LeftBehind]) -> None:
        """A call is over that left these."""
        for leaving in leavings:
            if not leaving.passes:
                there = value_at(leaving.table, leaving.name) if leaving.adds else None
                before = leaving.default if there is MISSING else there
                leaving.put(before + leaving.value if leaving.adds else leaving.value)
        _left[self] = [(leaving, None) for leaving in leavings if leaving.passes]
        for passing in _left.values():
            for k, (leaving, _) in enumerate(passing):
                passing[k] = leaving, leaving.look()
                leaving.put(leaving.value)


_left: WeakKeyDictionary[Leavings, list[tuple[LeftBehind, Any]]] = WeakKeyDictionary()
"""The stand-ins of tensors, each with the value that is there during calls."""
