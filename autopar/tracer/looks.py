"""Lines of a model's code that look at data, and yet have the same ops whatever the data is: those
that check data, those that only print or log it, and those that only clamp overflows."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from autopar.tracer.places import StackLocation, syntax_of


@dataclass(frozen=True, slots=True)
class Look:
    """The `answer` to all looks at data in a line. With `clamps`, they decide whether the result of
    the `torch.clamp` in that line replaces its input. The line `is_check` if it calls a function
    that raises unless its argument is true. It `leaves_out` an `if` that only prints or logs."""

    answer: bool
    clamps: int | None = None
    is_check: bool = False
    leaves_out: bool = False


def look_of(place: StackLocation) -> Look | None:
    """How to answer looks at data in the line that runs; None if they are to be refused."""
    return _looks(place.code.co_filename).get(place.line)


@cache
def _looks(file: str) -> dict[int, Look]:
    """The answers by line. In an assertion, a check, or an `if` that only raises, the answer is the
    one that raises nothing: the model's author has checked the data. An `if` that only clamps does
    clamp. Lines whose looks need different answers are left out, and checks whose error is
    caught."""
    tree = syntax_of(file)
    attempts = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    caught = {inner for node in attempts for line in node.body for inner in ast.walk(line)}
    looks: dict[int, Look] = {}
    for node in ast.walk(tree):
        look, last = None, node
        if isinstance(node, ast.Assert) and node not in caught:
            look = _answers_for(node.test, True)
        elif isinstance(node, ast.Expr) and _is_check(node.value) and node not in caught:
            look = Look(True, is_check=True)
        elif isinstance(node, ast.If):
            last, clamps = node.test, _clamps(node)
            if clamps is not None and _is_decided_by_parts(node.test, True):
                look = _answers_for(node.test, True, clamps)
            elif node not in caught and all(isinstance(line, ast.Raise) for line in node.body):
                look = _answers_for(node.test, False)
            elif not node.orelse and all(map(_only_tells, node.body)):
                look = _answers_for(node.test, False, leaves_out=True)
        if (
            look is not None
            and isinstance(node, ast.stmt)
            and isinstance(last, ast.stmt | ast.expr)
        ):
            looks |= dict.fromkeys(range(node.lineno, (last.end_lineno or last.lineno) + 1), look)
    return looks


def _is_check(value: ast.expr) -> bool:
    """Whether it is a call of torch's `_check` or its kin, or of that of transformers."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
            return name.startswith(("_check", "_assert"))
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name == "torch_compilable_check"
        case _:
            return False


_TELLING = frozenset(
    ("print", "warn", "warning", "warning_once", "info", "debug", "error", "critical", "log")
)


def _only_tells(line: ast.stmt) -> bool:
    """Whether a statement does no more than print or log."""
    match line:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            return name in _TELLING
        case _:
            return isinstance(line, ast.Pass)


def _answers_for(
    test: ast.expr, answer: bool, clamps: int | None = None, *, leaves_out: bool = False
) -> Look | None:
    """The answer to all looks in a condition that makes it `answer`; None if they differ."""
    answers = _parts_of_condition(test, answer)
    return Look(answers.pop(), clamps, leaves_out=leaves_out) if len(answers) == 1 else None


def _parts_of_condition(test: ast.expr, answer: bool) -> set[bool]:
    """The values of the parts of a condition that may look at data, if the condition is
    `answer`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _parts_of_condition(operand, not answer)
        case ast.BoolOp(values=parts):
            return {value for part in parts for value in _parts_of_condition(part, answer)}
        case _:
            return set() if _is_known(test) else {answer}


def _is_decided_by_parts(test: ast.expr, answer: bool) -> bool:
    """Whether a condition is `answer` if, and only if, all its parts have the values of
    `_parts_of_condition`: such as `x.isinf().any()`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_decided_by_parts(operand, not answer)
        case ast.BoolOp(op=op, values=parts):
            needs_all = isinstance(op, ast.And) == answer
            return needs_all and all(_is_decided_by_parts(part, answer) for part in parts)
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in ("all", "any", "item")
        case _:
            return _is_known(test)


def _is_known(test: ast.expr) -> bool:
    """Whether a condition is one on dtypes or on the mode, which look at no data."""
    match test:
        case ast.Attribute(attr="training") | ast.Compare(left=ast.Attribute(attr="dtype")):
            return True
        case _:
            return False


def _clamps(node: ast.If) -> int | None:
    """The line of `x = torch.clamp(x, ...)`, where an `if` does no more than that, with a limit
    from `torch.finfo` set before; else None."""
    *before, last = node.body
    if node.orelse or not all(isinstance(line, ast.Assign) and _is_limit(line) for line in before):
        return None
    match last:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(attr="clamp"), args=[ast.Name(id=given), *_]) as call,
        ) if name == given:
            return call.lineno
    return None


def _is_limit(line: ast.Assign) -> bool:
    calls = [node.func for node in ast.walk(line.value) if isinstance(node, ast.Call)]
    return all(isinstance(func, ast.Attribute) and func.attr == "finfo" for func in calls)
