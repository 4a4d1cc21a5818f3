"""Where a model may be cut into stages: before a module of a list, or beside such lists.

A segment is one of a list of modules (`layers.3`), or another module that uses parameters
(`embed_tokens`, `norm` and `lm_head`), with all that follows until the next. What forward changes,
running statistics say, is read and changed within one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.blocks import place_of
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.stage_homes import belongs_nowhere, is_of_parameters
from autopar.ir.stages import first_ops


@dataclass(frozen=True, slots=True)
class Segment:
    """The ops of forward from node `start` on, which begin with those of `module`."""

    module: str
    start: int


def segments(graph: Graph) -> tuple[Segment, ...]:
    """All of them, in the order in which forward computes them: one of the whole, without a module,
    where no module begins one."""
    ops = [
        node
        for node in graph.with_role(Role.OP)
        if node.phase is Phase.FORWARD and not node.view and not belongs_nowhere(graph, node)
    ]
    learned = {n.module for n in ops if any(is_of_parameters(graph, ref) for ref in n.inputs)}
    begins = first_ops(graph)
    found: list[Segment] = []
    seen, last = set[str](), -1
    for node in ops:
        listed, module = place_of(node.module)
        if module and module not in seen and (listed or module in learned):
            seen.add(module)
            # A module may use parameters of its own after others within it: it began with those.
            if not found or begins[module] > last:
                found.append(Segment(module, node.index if found else 0))
        last = node.index
    if not found:
        return (Segment("", 0),)
    changes = [*_changes(graph)]
    return tuple(
        each for each in found if not any(first < each.start <= last for first, last in changes)
    )


def _changes(graph: Graph) -> Iterator[tuple[int, int]]:
    """The first op of forward that reads something that forward changes, and the one that makes
    what it becomes."""
    made = {n.target: n.inputs[0].node for n in graph.with_role(Role.MUTATION, Role.UPDATE)}
    if not made:
        return
    held = graph.with_role(Role.BUFFER, Role.PARAM)
    names = {n.index: n.target for n in held if n.target in made}
    first = dict(made)
    for node in graph.with_role(Role.OP):
        for name in (names[ref.node] for ref in node.inputs if ref.node in names):
            first[name] = min(first[name], node.index)
    yield from ((first[name], last) for name, last in made.items())
