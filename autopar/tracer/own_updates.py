"""Which attributes a line of code reads only to update them: the counter of `self.calls += 1`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import CodeType, FrameType


def is_own_update(frame: FrameType, name: str) -> bool:
    """Whether the line that `frame` is at reads attribute `name` to add a number to it, and for
    nothing else."""
    return frame.f_lineno in _updates(frame.f_code).get(name, ())


@cache
def _updates(code: CodeType) -> Mapping[str, frozenset[int]]:
    """The lines where attributes are updated, by name."""
    try:
        source = textwrap.dedent(inspect.getsource(code))
        tree = ast.parse(source)
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
    """The attribute to which a statement adds a number; empty for any other."""
    match statement:
        case ast.AugAssign(
            target=ast.Attribute(attr=name), op=ast.Add() | ast.Sub(), value=ast.Constant()
        ):
            return name
        case ast.Assign(
            targets=[ast.Attribute(attr=name)],
            value=ast.BinOp(
                left=ast.Attribute(attr=read), op=ast.Add() | ast.Sub(), right=ast.Constant()
            ),
        ) if name == read:
            return name
        case _:
            return ""


def _reads(statement: ast.stmt) -> set[str]:
    return {x.attr for x in ast.walk(statement) if isinstance(x, ast.Attribute)}
