"""What the code of a model reads besides its arguments and modules: globals and closures.

Installed packages are assumed not to change: only the user's own files are searched.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autopar.runtime.program.guards import Read

# What a line of code reads only to update it: the counter of `self.calls += 1`, of `CALLS += 1`
# with a global, or of `self.calls["forward"] += 1`.


def is_own_update(frame: FrameType, name: str) -> bool:
    """Whether the line that `frame` is at reads attribute `name` to add a number to it, or to what
    it holds, and for nothing else."""
    return frame.f_lineno in own_updates(frame.f_code).get(name, ())


@cache
def own_updates(code: CodeType) -> Mapping[str, frozenset[int]]:
    """The lines where attributes and variables are updated, by name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return {}
    updates: dict[str, set[int]] = {}
    others: set[tuple[str, int]] = set()
    first = code.co_firstlineno - 1
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and (name := _updated(statement)):
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            updates.setdefault(name, set()).update(first + line for line in lines)
            others |= {(x, first + line) for x in _reads(statement) - {name} for line in lines}
    return {
        name: frozenset(line for line in lines if (name, line) not in others)
        for name, lines in updates.items()
    }


def _updated(statement: ast.stmt) -> str:
    """The attribute or variable to which a statement adds a number; empty for any other."""
    match statement:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub(), value=ast.Constant()):
            return _name(target)
        case ast.Assign(
            targets=[ast.Attribute() | ast.Name() as target],
            value=ast.BinOp(
                left=ast.Attribute() | ast.Name() as read,
                op=ast.Add() | ast.Sub(),
                right=ast.Constant(),
            ),
        ) if _name(target) == _name(read):
            return _name(target)
        case _:
            return ""


def _name(target: ast.expr) -> str:
    match target:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Subscript(value=ast.Attribute() | ast.Name() as held, slice=ast.Constant()):
            return _name(held)
        case _:
            return ""


def _reads(statement: ast.stmt) -> set[str]:
    return {_name(x) for x in ast.walk(statement) if isinstance(x, ast.Attribute | ast.Name)}


_MODULE_CLASSES = frozenset(nn.Module.__mro__)
_NONE = object()
_NAMES = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"}
)
"""Instructions that name what is outside of a function. What is only set there counts too."""
_PASSING = frozenset({"CACHE", "COPY"})
"""Instructions that leave the owner of an attribute on the stack."""


@cache
def is_installed(file: str) -> bool:
    """Whether a file is part of Python, of an installed package or of autopar."""
    if file.startswith("<frozen"):
        return True
    paths = sysconfig.get_paths()
    own = str(Path(__file__).parents[1])
    folders = {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")} | {own}
    return any(file.startswith(f"{folder}/") for folder in folders)


def reachable(model: nn.Module, leaves: list[Any]) -> tuple[Read, ...]:
    """The globals, cells and attributes of user's classes and modules that a call of `model`, given
    `leaves`, may read."""
    search = _Search()
    for module in model.modules():
        search.methods(type(module), "forward")
        for value in vars(module).values():
            if isinstance(value, Mapping):  # of hooks
                for hook in list(value.values()):
                    search.function(hook)
            search.function(value)
    for leaf in leaves:
        search.function(leaf)
    return tuple(search.paths.values())


class _Search:
    def __init__(self) -> None:
        self.paths: dict[tuple[int, str], Read] = {}
        self._functions: set[FunctionType] = set()
        self._methods: set[tuple[type, str]] = set()

    def methods(self, kind: type, name: str) -> None:
        """Search method or property `name` of a class, and the others that its code names."""
        if (kind, name) in self._methods:
            return
        self._methods.add((kind, name))
        for each in kind.__mro__:
            member = vars(each).get(name)
            if member is not None:
                if each not in _MODULE_CLASSES:
                    for used in self.function(getattr(member, "fget", member)):
                        self.methods(kind, used)
                return

    def function(self, value: Any) -> set[str]:
        """Search `value`, if it is a function. Returns the attributes that its code reads."""
        value = (
            value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value
        )
        if not isinstance(value, FunctionType) or value in self._functions:
            return set()
        self._functions.add(value)
        code, used = value.__code__, set[str]()
        cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
        if not is_installed(code.co_filename):
            for name, attributes, is_updated in _loads(code):
                if name in cells:
                    self._cell(name, cells[name], value.__qualname__, attributes, is_updated)
                elif name in value.__globals__:
                    where = f"{name} of {value.__module__}"
                    self._entry(Read(value.__globals__, name, where, is_updated), attributes)
            used = {name for each in _codes(code) for name in each.co_names}
        for cell in cells.values():
            # What a decorator wraps.
            used |= self.function(_content(cell))
        return used

    def _cell(
        self,
        name: str,
        cell: CellType,
        function: str,
        attributes: Mapping[str, bool],
        is_updated: bool,
    ) -> None:
        content = _content(cell)
        if name != "__class__" and content is not _NONE:
            read = Read(cell, "cell_contents", f"{name}, which {function} closes over", is_updated)
            self._value(read, content, attributes)

    def _entry(self, read: Read, attributes: Mapping[str, bool]) -> None:
        table: Any = vars(read.owner) if isinstance(read.owner, type) else read.owner
        self._value(read, table[read.name], attributes)

    def _value(self, read: Read, value: Any, attributes: Mapping[str, bool]) -> None:
        if isinstance(value, ModuleType | type):
            file = _file(value)
            if file is None or is_installed(file):
                return
            owner: Any = value if isinstance(value, type) else vars(value)
            for name in sorted(attributes.keys() & vars(value).keys()):
                label = f"{read.label.split(' of ')[0]}.{name}"
                self._entry(Read(owner, name, label, attributes[name]), {})
        if isinstance(value, ModuleType | nn.Module):
            return
        if isinstance(value, FunctionType):
            if is_installed(value.__code__.co_filename):
                return
            self.function(value)
        elif not isinstance(value, type):
            for name in sorted(attributes):
                self.function(getattr(type(value), name, None))
        known = self.paths.get((id(read.owner), read.name), read)
        self.paths[id(read.owner), read.name] = read if known.is_updated else known


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NONE


def _file(value: ModuleType | type) -> str | None:
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        return _file(module) if module is not None else None
    return getattr(value, "__file__", None) or ("<main>" if value.__name__ == "__main__" else None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _loads(code: CodeType) -> Iterator[tuple[str, Mapping[str, bool], bool]]:
    """(name, attributes, is_updated) of the globals and free variables that code loads or sets.
    `attributes` says of each attribute that is read whether it is only updated, by adding a number;
    `is_updated` says that of the variable itself."""
    loads: dict[str, dict[str, bool]] = {}
    others: set[str] = set()
    for each in _codes(code):
        name, updates = "", own_updates(each)
        for instruction in dis.get_instructions(each):
            line = instruction.positions.lineno if instruction.positions else None
            if instruction.opname in _NAMES:
                name = instruction.argval
                loads.setdefault(name, {})
                others |= set() if line in updates.get(name, ()) else {name}
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name:
                taken, known = instruction.argval, loads[name]
                known[taken] = known.get(taken, True) and line in updates.get(taken, ())
                name = ""
            elif instruction.opname not in _PASSING:
                name = ""
    yield from sorted((name, taken, name not in others) for name, taken in loads.items())
