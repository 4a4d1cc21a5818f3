"""What is worked out of a graph once, and asked for again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import ReferenceType

from autopar.ir.graph import Graph

T = TypeVar("T")


def per_graph(find: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """`find`, which remembers its answer for as long as a graph, known by identity, is there."""
    known: dict[int, tuple[ReferenceType[Graph], T]] = {}

    @wraps(find)
    def found(graph: Graph) -> T:
        number = id(graph)
        held = known.get(number)
        if held is None or held[0]() is not graph:
            held = ReferenceType(graph, lambda _: known.pop(number, None)), find(graph)
            known[number] = held
        return held[1]

    return found
