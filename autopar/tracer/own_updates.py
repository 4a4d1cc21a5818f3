"""What a line of code reads only to update it: the counter of `self.calls += 1`, of `CALLS += 1`
with a global, or of `self.calls["forward"] += 1`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import CodeType, FrameType


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
    found: dict[str, set[int]] = {}
    others: set[tuple[str, int]] = set()
    first = code.co_firstlineno - 1
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and (name := _updated(statement)):
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            found.setdefault(name, set()).update(first + line for line in lines)
            others |= {(x, first + line) for x in _reads(statement) - {name} for line in lines}
    return {
        name: frozenset(line for line in lines if (name, line) not in others)
        for name, lines in found.items()
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
    names = (x for x in ast.walk(statement) if isinstance(x, ast.Attribute | ast.Name))
    return set(map(_name, names))
