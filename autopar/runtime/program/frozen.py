"""Snapshots of Python values, which can be compared with later ones.

Containers and objects are compared by content, functions by code and closure, and modules, classes
and opaque objects by identity. A float differs from the int that equals it: a program made for one
need not be right for the other. Objects are traversed 3 deep, so that one that refers to everything
(a logger, a trainer) has an end.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.errors import GuardError
from autopar.runtime.program.leavings import LeftTensor

PLAIN = (
    type(None), bool, int, complex, str, bytes, range, slice, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose values never change, and that compare as they should among themselves."""

_STATEFUL = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LIMIT = 20_000
_DEPTH = 3


class Same:
    """Stands for one object: equal to another of these only if that holds the same one."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"<{getattr(self.held, '__qualname__', type(self.held).__qualname__)}>"


class Freezer:
    """Freezes values one after the other; each object is traversed once.

    `container` is called with each mutable object and its items: a dict, list or set, an object's
    own `vars`, a cell or a class. `tensor` and `array` are called with each tensor and array.
    GuardError for objects that change as they are used (iterators, generators of random numbers),
    or that are too large.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0

    @property
    def is_inside_object(self) -> bool:
        """Whether what is being frozen belongs to an object that is no container."""
        return self._depth > 0

    def container(self, held: Any, items: Iterable[tuple[Any, Any]]) -> None:
        """`held[key] is value` for all items, and it has no others."""

    def tensor(self, held: Tensor) -> Hashable:
        """The snapshot of a tensor that is a constant of the program."""
        if isinstance(held, LeftTensor):
            return Same(held)
        return "tensor", Same(held), held._version if not held.is_inference() else 0

    def array(self, held: np.ndarray) -> Hashable:
        """The snapshot of a NumPy array."""
        return "array", held.dtype.str, held.shape, held.tobytes()

    def freeze(self, value: Any, where: str) -> Hashable:
        """`value` as it is now. `where` names it in errors."""
        kind = type(value)
        if kind in PLAIN:
            return value if kind is str or value is None else (kind, value)
        if kind is float:
            return "float", value.hex()
        if isinstance(value, Enum | type | nn.Module | ModuleType | BuiltinFunctionType):
            return Same(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if len(self._alive) > _LIMIT:
            raise GuardError(
                f"{where} holds over {_LIMIT:,} objects, too many to look through before each "
                "call: give forward what it needs of it"
            )
        return self._look_into(value, where)

    def _look_into(self, value: Any, where: str) -> Hashable:
        kind = type(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            return self.array(value)
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, tuple):
            return kind, tuple(self.freeze(x, where) for x in value)
        if isinstance(value, Mapping):
            return kind, self._items(value, list(value.items()), where)
        if isinstance(value, list | deque):
            return kind, self._items(value, list(enumerate(value)), where)
        if isinstance(value, Set):
            self.container(value, ())
            return kind, frozenset(self.freeze(x, where) for x in value)
        if isinstance(value, _STATEFUL):
            if self._depth:
                return Same(value)
            raise GuardError(
                f"{where} is a {kind.__qualname__}, which changes as it is used: a compiled "
                "program would repeat what it gave once. Use it before the call, and pass that"
            )
        if isinstance(value, FunctionType):
            return self._function(value, where)
        if isinstance(value, MethodType):
            return "method", self.freeze(value.__self__, where), self.freeze(value.__func__, where)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return "partial", tuple(self.freeze(x, where) for x in parts)
        return self._object(value, where)

    def _items(self, held: Any, items: list[tuple[Any, Any]], where: str) -> Hashable:
        self.container(held, items)
        return tuple((self.freeze(k, where), self.freeze(v, where)) for k, v in items)

    def _function(self, value: FunctionType, where: str) -> Hashable:
        cells = [(c, c.cell_contents) for c in value.__closure__ or () if not _is_empty(c)]
        for cell, content in cells:
            self.container(cell, [("cell_contents", content)])
        bound = (value.__defaults__, value.__kwdefaults__, *(content for _, content in cells))
        return "function", Same(value.__code__), tuple(self.freeze(x, where) for x in bound)

    def _object(self, value: Any, where: str) -> Hashable:
        # Ops cache facts about themselves.
        if self._depth == _DEPTH or type(value).__module__.startswith("torch._"):
            return Same(value)
        table = vars(value) if hasattr(value, "__dict__") else {}
        slots = [(name, getattr(value, name)) for name in _slots(type(value), value)]
        if not table and not slots:
            return Same(value)
        self._depth += 1
        try:
            inside = self._items(table, list(table.items()), where)
            self.container(value, slots)
            more = tuple((name, self.freeze(x, where)) for name, x in slots)
        finally:
            self._depth -= 1
        return Same(type(value)), inside, more


def frozen(value: Any, where: str) -> Hashable:
    """The snapshot of `value`: equal to another, or a later one, if nothing differs."""
    return Freezer().freeze(value, where)


def _slots(kind: type, value: Any) -> Iterator[str]:
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def _is_empty(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
