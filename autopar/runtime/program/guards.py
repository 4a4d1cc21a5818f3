"""Guards: checks before every call that the values that a trace read are unchanged.

A trace reads more than tensors: attributes such as a temperature, hooks, submodules, globals. Its
program is right while these are unchanged. The check takes microseconds: a generated function
compares identities (`table["p"] is value`) and nothing else. If one differs, values are compared.
If they are equal after all, the function is generated anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.program.externals import is_external
from autopar.runtime.program.frozen import Freezer, Same
from autopar.runtime.program.leavings import LeftTensor

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = frozenset(
    {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
)
_MISSING = "missing"
_HEAP_TYPE = 1 << 9
_LOOKED_INTO = (
    nn.Module, Tensor, type, Enum, Mapping, Set, list, tuple, deque, partial, FunctionType,
    MethodType,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Read:
    """A read of a trace: attribute `name` of a module or of an object that one holds, or an entry
    of a file's globals, a class, or a function's closure. `label` is its name in messages. If
    `is_updated`, it is only read to add a number to it."""

    owner: Any
    name: str
    label: str
    is_updated: bool = False


class Guard:
    """The guard of a program: checks that the reads of its trace give the values of now."""

    def __init__(self, model: nn.Module, reads: Iterable[Read]) -> None:
        self._model = model
        # The read that differs between programs most often is checked first.
        each = {(id(read.owner), read.name): read for read in reads}.values()
        self._reads = tuple(sorted(each, key=lambda read: read.name != "training"))
        self.trained: tuple[Tensor, ...]
        """The tensors among the reads that require a gradient, without those of modules."""
        self._state, self._check, self.trained = self._look()

    def holds(self) -> bool:
        """Whether every object is the same as before. True is certain; False may be wrong."""
        try:
            return self._check()
        except (KeyError, IndexError, AttributeError, ValueError, TypeError):
            return False

    def holds_after_all(self, and_so: Callable[[], bool]) -> bool:
        """Whether all values are equal to those before, if not the same objects, and `and_so` is
        true. If so, `holds` compares with the new objects from then on."""
        state, check, trained = self._look()
        if state != self._state or not and_so():
            return False
        self._check, self.trained = check, trained
        return True

    def changed(self) -> list[str]:
        """The labels of values that are not equal to those before."""
        state, _, _ = self._look()
        labels = ("torch's default dtype", *(read.label for read in self._reads))
        pairs = zip(labels, self._state, state, strict=True)
        return [label for label, was, now in pairs if was != now]

    def _look(self) -> tuple[tuple[Hashable, ...], Callable[[], bool], tuple[Tensor, ...]]:
        """(snapshots of the reads, function that checks whether all are the same, tensors with a
        gradient)."""
        modules = {*self._model.modules()}
        states = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        looking = _Looking(
            modules, states, {id(x.owner) for x in self._reads if is_watchable(x.owner)}
        )
        state = (torch.get_default_dtype(), *map(looking.read, self._reads))
        return state, looking.written(), tuple(looking.trained)


class _Looking(Freezer):
    """Freezes the values of reads, and collects the terms that check them. `modules` are the
    model's. `states` are the identities of its parameters and buffers, whose values may change.
    `watched` are those of objects whose reads are known one by one."""

    def __init__(self, modules: set[nn.Module], states: set[int], watched: set[int]) -> None:
        super().__init__()
        self.trained: list[Tensor] = []
        self._modules = modules
        self._states = states
        self._watched = watched
        self._names: dict[str, Any] = {"default_dtype": torch.get_default_dtype}
        self._known: dict[int, str] = {}
        self._empty: dict[int, Any] = {}
        self._classes: dict[type, Any] = {}
        self._terms: dict[str, None] = {}
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._ties: dict[int, int] = {}
        self._term(f"default_dtype() is {self._name(torch.get_default_dtype())}")

    def written(self) -> Callable[[], bool]:
        """The function that checks all terms."""
        # One call is the fastest for all empty containers, most of them hooks, and for all sizes.
        self._term(f"not any({self._name(tuple(self._empty.values()))})")
        held, sizes = (
            map(list, zip(*self._sizes.values(), strict=True)) if self._sizes else ([], [])
        )
        terms = [f"[*map(len, {self._name(held)})] == {self._name(sizes)}", *self._terms]
        # Its own variables are found sooner than those of a module.
        known = ", ".join(f"{name}={name}" for name in self._names)
        source = f"def check({known}):\n    return (" + "\n        and ".join(terms) + ")\n"
        exec(compile(source, "<guard>", "exec"), self._names)
        return self._names["check"]

    def read(self, read: Read) -> Hashable:
        """The snapshot of the read's value now."""
        owner, name = read.owner, read.name
        if isinstance(owner, nn.Module):
            return self._attribute(owner, name, read.label)
        if isinstance(owner, CellType):
            try:
                content = owner.cell_contents
            except ValueError:
                return _MISSING
            self.container(owner, [("cell_contents", content)])
            return self.freeze(content, read.label)
        if is_watchable(owner):
            return self._of_object(owner, name, read.label)
        table = self._table(owner) if isinstance(owner, type) else owner
        if name not in table:
            self._term(f"{name!r} not in {self._name(table)}")
            return _MISSING
        return self._entry(table, name, read.label)

    def _attribute(self, module: nn.Module, name: str, label: str) -> Hashable:
        table = vars(module)
        # An attribute of an object hides that of its class, so none may be added.
        self._size(table)
        if name in HOOKS:
            self.container(table[name], list(table[name].items()))
            return tuple(Same(hook) for hook in table[name].values())
        if name in TABLES:
            entries = table[name]
            self.container(entries, list(entries.items()))
            return tuple((key, self._state(entries, key)) for key in entries)
        if name in table:
            value = table[name]
            is_input = is_state(value) or is_external(value)
            return self._state(table, name) if is_input else self._entry(table, name, label)
        for inner in TABLES:
            if name in table[inner]:
                return self._state(table[inner], name)
        return self._of_class(type(module), name, label)

    def _of_object(self, owner: Any, name: str, label: str) -> Hashable:
        table = vars(owner)
        # How configurations of transformers have several names for an attribute.
        name = getattr(type(owner), "attribute_map", {}).get(name, name)
        if name in table:
            return self._entry(table, name, label)
        self._term(f"{name!r} not in {self._name(table)}")
        return self._of_class(type(owner), name, label)

    def _of_class(self, kind: type, name: str, label: str) -> Hashable:
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        return _MISSING if owner is None else self._entry(self._table(owner), name, label)

    def freeze(self, value: Any, where: str) -> Hashable:
        if id(value) in self._watched:
            return Same(value)
        if isinstance(value, nn.Module) and value not in self._modules:
            self._modules.add(value)
            return Same(value), tuple(self._tensors_of(value, where))
        return super().freeze(value, where)

    def _tensors_of(self, other: nn.Module, where: str) -> Iterator[Hashable]:
        """The tensors of a module that is not among the model's, such as one in a plain list."""
        for module in other.modules():
            for table in (module._parameters, module._buffers):
                self.container(table, list(table.items()))
                yield tuple((name, self.freeze(x, where)) for name, x in table.items())

    def _table(self, kind: type) -> Any:
        """The attributes of a class: the same object whenever it is asked for."""
        return self._classes.setdefault(kind, vars(kind))

    def _state(self, table: dict[str, Any], name: str) -> Hashable:
        """A parameter, a buffer or a submodule: values of tensors are inputs of the program."""
        value = table[name]
        self._is(table, name, value)
        if not isinstance(value, Tensor):
            return Same(value)
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            # Autograd checks parameters that require one (`function.RefrozenError`).
            self._term(f"{self._name(value)}.requires_grad is False")
        return self._ties.setdefault(id(value), len(self._ties)), *form(value)

    def _entry(self, table: Any, name: str, label: str) -> Hashable:
        value = table[name]
        self._is(table, name, value)
        if isinstance(value, staticmethod | classmethod | property):
            return Same(value)
        return self.freeze(value, label)

    def container(self, held: Any, items: Iterable[tuple[Any, Any]]) -> None:
        pairs = list(items)
        if isinstance(held, set | frozenset):
            self._term(f"{self._name(held)} == {self._name(frozenset(held))}")
            return
        if not pairs and hasattr(held, "__len__"):
            self._empty[id(held)] = held
            return
        by_key = hasattr(held, "__getitem__")
        if by_key:
            self._size(held)
        for key, value in pairs:
            if by_key:
                self._is(held, key, value)
            else:
                self._term(f"{self._name(held)}.{key} is {self._name(value)}")

    def tensor(self, held: Tensor) -> Hashable:
        if id(held) in self._states:
            return form(held)
        if not isinstance(held, LeftTensor) and held.requires_grad:
            self.trained.append(held)
            return "trained", *form(held)
        if not isinstance(held, LeftTensor) and not held.is_inference():
            self._term(f"{self._name(held)}._version == {held._version}")
        return super().tensor(held)

    def array(self, held: np.ndarray) -> Hashable:
        self._term(f"{self._name(held)}.tobytes() == {self._name(held.tobytes())}")
        return super().array(held)

    def _is(self, table: Any, key: Any, value: Any) -> None:
        written = repr(key) if type(key) in (str, int) else self._name(key)
        self._term(f"{self._name(table)}[{written}] is {self._name(value)}")

    def _size(self, held: Any) -> None:
        """It has as many items as now."""
        self._sizes[id(held)] = held, len(held)

    def _term(self, term: str) -> None:
        self._terms[term] = None

    def _name(self, value: Any) -> str:
        """A name for an object, which stays alive with it."""
        if value is None or value is True or value is False:
            return repr(value)
        name = self._known.setdefault(id(value), f"x{len(self._known)}")
        self._names[name] = value
        return name


def is_state(value: Any) -> bool:
    """Whether an attribute of a module is a tensor like a buffer, though it is registered nowhere:
    its value is an input of the program."""
    return isinstance(value, Tensor) and not value.requires_grad and not isinstance(value, DTensor)


def is_watchable(value: Any) -> bool:
    """Whether a value is an object whose attribute reads can be observed."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and bool(kind.__flags__ & _HEAP_TYPE)
        and not kind.__module__.startswith(("torch.", "numpy."))
        and not isinstance(value, _LOOKED_INTO)
    )


def form(tensor: Tensor) -> tuple[Hashable, ...]:
    """The properties of an input tensor that a program depends on."""
    return (
        tuple(tensor.shape),
        str(tensor.dtype),
        tensor.requires_grad,
    )
