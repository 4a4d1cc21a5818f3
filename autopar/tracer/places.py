"""Where in the user's code something runs, and what becomes of the value of an expression there."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Literal

import numpy as np
import torch

import autopar

_OTHERS = tuple(
    str(Path(str(file)).parent) + "/" for file in (torch.__file__, autopar.__file__, np.__file__)
)
_STANDARD = str(Path(ast.__file__).parent) + "/"

ValueUse = Literal["branch", "chance", "size", "index", "order", "log", "number"]
"""The use of a value: it decides which code runs, by chance or not; it is a size or a bound; it
picks an item; it is compared with others; it is stored or printed; it is computed with."""


@dataclass(frozen=True, slots=True)
class StackLocation:
    """An instruction of the user's code: its code object, line, and offset in the bytecode."""

    code: CodeType
    line: int
    offset: int

    def __str__(self) -> str:
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return f"{self.short}: {text}" if text else self.short

    @property
    def short(self) -> str:
        """ "file:line"."""
        return f"{self.code.co_filename}:{self.line}"


@cache
def is_users(file: str) -> bool:
    """Whether code is neither torch's, numpy's, the standard library's nor autopar's."""
    if file.startswith((*_OTHERS, "<frozen ")):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def users_frame() -> FrameType:
    """The frame that runs, of the user's code."""
    frame = sys._getframe(1)
    while not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def users_place() -> StackLocation:
    """Where the user's code is that runs."""
    frame = users_frame()
    return StackLocation(frame.f_code, frame.f_lineno, frame.f_lasti)


def users_call() -> list[FrameType]:
    """The frames of what the user's code has called, the outermost first."""
    called: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        called.append(frame)
        frame = frame.f_back
    return called[::-1]


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, StackLocation]]:
    """The frames that `error` went through, the outermost first."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        yield frame, StackLocation(frame.f_code, trace.tb_lineno, trace.tb_lasti)
        trace = trace.tb_next


def use_of(place: StackLocation) -> ValueUse:
    """What becomes of the value that the expression at `place` gives."""
    parents = _parents(place.code.co_filename)
    node = _expression(parents, place)
    match node:
        case None:
            return "number"
        case ast.Subscript(slice=index):
            slices = [part for part in ast.walk(index) if isinstance(part, ast.Slice)]
            return "size" if slices else "index"
        case ast.IfExp() | ast.BoolOp():
            use = "branch"
        case ast.Call(func=ast.Name(id=name)):
            use = _use_in_call(name) or _use(node, parents)
        case _:
            use = _use(node, parents)
    return "chance" if use == "branch" and _is_chance(node, parents) else use


def call_at(place: StackLocation) -> str:
    """The name of what the expression at `place` calls: "item" of `x.item()`; "" if nothing."""
    match _expression(_parents(place.code.co_filename), place):
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
        case _:
            return ""


def syntax_of(file: str) -> ast.Module:
    """A file's syntax tree; an empty one where there is no such file."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _parents(file: str) -> dict[ast.AST, ast.AST]:
    """The parent of each node of a file's syntax tree."""
    nodes = ast.walk(syntax_of(file))
    return {child: node for node in nodes for child in ast.iter_child_nodes(node)}


def _expression(parents: dict[ast.AST, ast.AST], place: StackLocation) -> ast.expr | None:
    """The smallest expression that the instruction at `place` is part of."""
    position = next(islice(place.code.co_positions(), place.offset // 2, None), None)
    if position is None or None in position:
        return None
    line, last_line, column, last_column = position
    start, end = (line, column), (last_line, last_column)
    around = [
        node
        for node in parents
        if isinstance(node, ast.expr)
        and (node.lineno, node.col_offset) <= start  # pyright: ignore[reportOperatorIssue]
        and end <= (node.end_lineno, node.end_col_offset)  # pyright: ignore[reportOperatorIssue]
    ]
    # In the order of the tree: the innermost comes last.
    return around[-1] if around else None


_SIZES = frozenset({
    "arange", "chunk", "empty", "expand", "eye", "full", "linspace", "narrow", "new_empty",
    "new_full", "new_ones", "new_zeros", "one_hot", "ones", "pad", "rand", "randint", "randn",
    "randperm", "range", "repeat", "reshape", "split", "tensor_split", "unflatten", "unfold",
    "view", "zeros",
})  # fmt: skip
_LOGS = frozenset({
    "add", "add_scalar", "append", "critical", "debug", "error", "extend", "info", "log",
    "log_dict", "print", "set", "update", "warn", "warning", "write",
})  # fmt: skip
_ORDERS = frozenset({"max", "min", "sorted"})
_KEYS = frozenset({"get", "index", "pop", "setdefault"})


def _use(
    node: ast.AST, parents: dict[ast.AST, ast.AST], names: frozenset[str] = frozenset()
) -> ValueUse:
    """`names` are those whose uses are being looked at, since the value went into them."""
    while (parent := parents.get(node)) is not None:
        match parent:
            case (
                ast.If(test=test)
                | ast.While(test=test)
                | ast.IfExp(test=test)
                | ast.Assert(test=test)
            ):
                if test is node:
                    return "branch"
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return "branch"
            case ast.comprehension(ifs=conditions):
                return "branch" if node in conditions else "size"
            case ast.Slice() | ast.For():
                return "size"
            case ast.Subscript(slice=index):
                if index is node:
                    return "index"
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if (
                node is not parent.func
            ):
                use = _use_in_call(name)
                if use is not None:
                    return use
            case ast.Lambda():
                return "number"
            case ast.JoinedStr() | ast.FormattedValue() | ast.Expr() | ast.Dict():
                return "log"
            case (
                ast.Assign(targets=[target])
                | ast.AnnAssign(target=target)
                | ast.NamedExpr(target=target)
            ):
                return _use_of_target(target, parent, parents, names)
            case ast.keyword() | ast.Call() | ast.expr():
                pass
            case _:
                return "number"
        node = parent
    return "number"


def _use_in_call(name: str) -> ValueUse | None:
    """That of an argument; None where the call's result is what it is."""
    if name in _SIZES:
        return "size"
    if name in _LOGS:
        return "log"
    if name in _ORDERS:
        return "order"
    return "index" if name in _KEYS else None


_HARDEST: tuple[ValueUse, ...] = ("branch", "size", "index", "order", "number", "log")


def _use_of_target(
    target: ast.AST, assigned: ast.AST, parents: dict[ast.AST, ast.AST], names: frozenset[str]
) -> ValueUse:
    """That of a name: of all its uses in the same function, the one hardest to do without. A name
    that a value goes into again (`mask = mask[at]`) has no further uses."""
    if not isinstance(target, ast.Name):
        return "log" if isinstance(target, ast.Attribute | ast.Subscript) else "number"
    if target.id in names:
        return "log"
    uses = {
        _use(node, parents, names | {target.id})
        for node in ast.walk(_function_of(assigned, parents))
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load)
    }
    return min({*uses, "log"}, key=_HARDEST.index)


def _function_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        if node not in parents:
            return node
        node = parents[node]
    return node


def _is_chance(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a value is drawn in the expression, or where the names in it are assigned."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    drawn = [node]
    for part in ast.walk(_function_of(node, parents)):
        if isinstance(part, ast.Assign):
            targets = {n.id for t in part.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            drawn += [part.value] if names & targets else []
    called = [part.func for each in drawn for part in ast.walk(each) if isinstance(part, ast.Call)]
    return any(
        isinstance(func, ast.Attribute) and ("rand" in func.attr or func.attr in _DRAWS)
        for func in called
    )


_DRAWS = frozenset({"bernoulli", "multinomial", "normal_", "uniform_"})
