"""Which names of a graph the patterns of constraints match, and the error text if none does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from types import MappingProxyType

from autopar.errors import ConstraintError, listed
from autopar.ir.graph import Graph, Role
from autopar.plans.requests.constraints import OP_KINDS, Constraint, check_kind

_OUTPUTS = (Role.LOSS, Role.VALUE, Role.DETACHED)
_MANY = 12
_NONE: Mapping[str, str] = MappingProxyType({})


@cache
def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of the shell matches a dotted name."""
    return pattern in ("*", name) or fnmatchcase(name, pattern)


@cache
def covers(pattern: str, name: str) -> bool:
    """Whether a pattern matches a dotted name, or the name of a module around it."""
    return matches(pattern, name) or any(matches(pattern, outer) for outer in outer_names(name))


def outer_names(name: str) -> tuple[str, ...]:
    """`a.b`, `a` of `a.b.c`."""
    parts = name.split(".")
    return tuple(".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1))


def general(name: str) -> str:
    """`layers.*.mlp` of `layers.3.mlp`: each part that is a number is a star."""
    return ".".join("*" if _is_number(part) else part for part in name.split("."))


def _is_number(part: str) -> bool:
    # Names in files may have been made by others: figures of all scripts, and of any length.
    return part.isascii() and part.isdigit() and len(part) < 10


def names(graph: Graph, kind: str) -> tuple[str, ...]:
    """The names that patterns of a kind of constraint can match, in order of appearance."""
    if kind in ("param", "for_backward"):
        choices: Iterable[str] = (n.target for n in graph.with_role(Role.PARAM) if not n.external)
    elif kind == "input":
        choices = (node.target for node in graph.with_role(Role.INPUT))
    elif kind == "output":
        choices = (node.target for node in graph.with_role(*_OUTPUTS))
    else:
        ops = dict.fromkeys(node.module for node in graph.with_role(Role.OP))
        choices = (name for module in ops for name in (module, *outer_names(module)))
    return tuple(dict.fromkeys(choices))


def resolve_constraints(
    graph: Graph, constraints: Sequence[Constraint], aliases: Mapping[str, str] = _NONE
) -> tuple[Constraint, ...]:
    """`constraints`, each with its kind. A pin without one is for parameters, or else for modules.
    A forbidden axis without a kind stays so, and holds for all that the pattern covers. Inputs and
    outputs have their position as name, or one of `aliases`: {"input:1": "labels"}.

    ConstraintError, with close names, if a pattern matches nothing.
    """
    known = cache(partial(names, graph))
    return tuple(
        settled
        for constraint in constraints
        for settled in _resolve(graph.name, constraint, known, aliases)
    )


def _resolve(
    model: str,
    constraint: Constraint,
    known: Callable[[str], tuple[str, ...]],
    aliases: Mapping[str, str],
) -> Iterator[Constraint]:
    if constraint.kind in ("input", "output"):
        yield from _by_position(model, constraint, known(constraint.kind), aliases)
        return
    kinds = (constraint.kind,) if constraint.kind else ("param", "module")
    forbids = not constraint.kind and constraint.is_forbidden
    match = covers if forbids or constraint.kind in (*OP_KINDS, "saved") else matches
    pattern = constraint.pattern
    hits = [
        kind
        for kind in kinds
        if pattern in known(kind) or any(match(pattern, name) for name in known(kind))
    ]
    if not hits:
        choices = [name for kind in kinds for name in known(kind) if name]
        raise ConstraintError(f"{constraint.origin}: {unmatched(model, pattern, choices, kinds)}")
    if not constraint.kind and len(hits) > 1 and not forbids:
        raise ConstraintError(
            f"{constraint.origin}: {constraint.pattern} names parameters and modules; write "
            f"param:{constraint.pattern} or module:{constraint.pattern}"
        )
    if constraint.kind or forbids:
        yield constraint
    else:
        check_kind(hits[0], constraint.placement, constraint.origin)
        yield replace(constraint, kind=hits[0])


def _by_position(
    model: str, constraint: Constraint, positions: Sequence[str], aliases: Mapping[str, str]
) -> Iterator[Constraint]:
    kind, pattern = constraint.kind, constraint.pattern
    named = {position: aliases.get(f"{kind}:{position}", position) for position in positions}
    chosen = [p for p, name in named.items() if matches(pattern, p) or matches(pattern, name)]
    if not chosen:
        known = list(named.values())
        raise ConstraintError(f"{constraint.origin}: {unmatched(model, pattern, known, [kind])}")
    yield from (replace(constraint, pattern=position) for position in chosen)


def unmatched(
    model: str, pattern: str, known: Sequence[str], kinds: Sequence[str] = ("output",)
) -> str:
    """The error text for a pattern that matches none of the `known` names."""
    what = " or ".join({"param": "parameter", "for_backward": "parameter"}.get(k, k) for k in kinds)
    what = "module" if kinds[0] in (*OP_KINDS, "saved") else what
    patterns = dict.fromkeys(map(general, known))
    choices = list(patterns if "*" in pattern else dict.fromkeys([*known, *patterns]))
    close = get_close_matches(pattern, choices, n=3, cutoff=0.5)
    if close:
        return f"{model} has no {what} {pattern}; close to it are {', '.join(close)}"
    return f"{model} has no {what} {pattern}; there are {listed(patterns, _MANY)}"
