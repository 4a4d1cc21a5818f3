"""The blocks of a step: units of compute, behind each of which the next block's parameters are
prefetched.

A block is one of a list of modules (`layers.3`), or modules beside such lists that use parameters
(`norm` and `lm_head`); ops of modules that use none belong to the block before. Blocks are joined
until their parameters fill the largest bucket of the mesh. A backward in two parts
(`passes.stages`) has blocks of both.

While a block is computed, the parameters of the next are gathered, and the gradients of the one
before are reduced. `plans.scheduling.events` schedules it so, and prices count on it. All blocks of
one list are one *window*, and so is each block beside lists. A window takes as long as its busiest
resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.buckets import is_bucketed
from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Node, Phase, Role, per_graph
from autopar.ir.mesh import BUCKET_BYTES, Mesh
from autopar.ir.uses import Group, groups

WindowPlace = tuple[Phase, str]
"""(phase, name) of a window: the name is the path of a list of modules with `*` for the number. For
a block beside lists it is the path of the module with most parameters."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of both phases, numbered in order within each. `of` has the block of each op,
    `windows` the window of each block. Where backward comes in two parts, `second` is the first
    block of the second part."""

    of: Mapping[int, int]
    windows: Mapping[Phase, tuple[str, ...]]
    second: int = 0

    def first_with(self, phase: Phase, block: int) -> int:
        """The first block of the same part of the phase as `block`."""
        return self.second if phase is Phase.BACKWARD and block >= self.second else 0

    def window(self, phase: Phase, block: int) -> WindowPlace | None:
        """The window of a block; None if there is no such block."""
        names = self.windows[phase]
        return (phase, names[block]) if 0 <= block < len(names) else None

    def window_of(self, node: Node) -> WindowPlace | None:
        """The window in which an op is computed; None for what is no op."""
        return self.window(node.phase, self.of[node.index]) if node.index in self.of else None


def blocks_of(graph: Graph, mesh: Mesh) -> Blocks:
    """The blocks of `graph` on `mesh`."""
    full_bytes = max((axis.bucket_bytes for axis in mesh), default=BUCKET_BYTES)
    known = _known(graph)
    if full_bytes not in known:
        known[full_bytes] = _find(graph, full_bytes)
    return known[full_bytes]


@per_graph
def _known(_: Graph) -> dict[int, Blocks]:
    """The cached blocks of a graph, by the bytes that fill one."""
    return {}


def _find(graph: Graph, full_bytes: int) -> Blocks:
    block_of: dict[int, int] = {}
    windows: dict[Phase, tuple[str, ...]] = {}
    second = 0
    for phase in Phase:
        sizes, names, held, largest = _sizes(graph, phase), [""], 0, -1
        seen, begun = set[_Place](), False
        for node in graph.with_role(Role.OP):
            if node.phase is not phase:
                continue
            place = place_of(node.module)
            is_second = graph.second_part is not None and node.index >= graph.second_part
            if is_second and begun and not second:
                names.append("")
                second, held, largest = len(names) - 1, 0, -1
                seen.clear()
            begun = True
            if place not in seen and (place[0] or place in sizes):
                seen.add(place)
                if len(seen) > 1 and held >= full_bytes:
                    names.append("")
                    held, largest = 0, -1
                size = sizes.get(place, 0)
                if size > largest:
                    names[-1], largest = place[0] or place[1], size
                held += size
            block_of[node.index] = len(names) - 1
        windows[phase] = tuple(names)
    return Blocks(block_of, windows, second)


_Place = tuple[str, str]
"""What `place_of` makes of the path of a module."""


def _sizes(graph: Graph, phase: Phase) -> dict[_Place, int]:
    """Per place, the bytes of the parameters that are first used there, or of the gradients made
    there: the larger of the two. What is cast counts once: parameters after, gradients before."""
    used, produced = dict[_Place, int](), dict[_Place, int]()
    casts = casts_of(graph)
    for group in groups(graph):
        if group.phase is not phase or not is_bucketed(graph, group):
            continue
        if casts.of_parameter(graph, group):
            sizes, at = used, [use.node for use in group.uses if use.node not in casts.copies]
        else:
            sizes, at = produced, [n for n in (group.root.node,) if n not in casts.gradients]
        if at:
            place = place_of(graph.nodes[min(at)].module)
            sizes[place] = sizes.get(place, 0) + graph.type_of(group.root).num_bytes
    return {p: max(used.get(p, 0), produced.get(p, 0)) for p in {**used, **produced}}


def place_of(module: str) -> _Place:
    """(list, block) of a module: the list of modules that it is in, and the item of that list that
    it is, or is part of. ("", module) for a module in no list.

    >>> place_of("model.layers.3.mlp")
    ('model.layers.*', 'model.layers.3')
    """
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        if part.isdigit():
            return ".".join((*parts[: count - 1], "*")), ".".join(parts[:count])
    return "", module


def waits_in(graph: Graph, mesh: Mesh, group: Group) -> WindowPlace | None:
    """The window that waits for the redistributions of a group: that of its first use."""
    known = blocks_of(graph, mesh)
    first = min((use.node for use in group.uses if use.node in known.of), default=group.root.node)
    return known.window_of(graph.nodes[first])


def launched_in(graph: Graph, mesh: Mesh, group: Group) -> WindowPlace | None:
    """The window in which the host launches the redistributions of a group."""
    return hides_in(graph, mesh, group) or waits_in(graph, mesh, group)


def hides_in(graph: Graph, mesh: Mesh, group: Group) -> WindowPlace | None:
    """The window that hides the redistributions of a group: for a parameter, the block before the
    first that uses it; for a gradient, the block after the one that makes it. None where there is
    no such block, or where an op waits for them."""
    if not is_bucketed(graph, group):
        return None
    known, root = blocks_of(graph, mesh), graph.nodes[group.root.node]
    if casts_of(graph).of_parameter(graph, group):
        first = min((known.of[u.node] for u in group.uses if u.node in known.of), default=0)
        is_first = first == known.first_with(group.phase, first)
        return None if is_first else known.window(group.phase, first - 1)
    if root.index not in known.of:
        return None
    after = known.of[root.index] + 1
    if group.phase is Phase.BACKWARD:
        # What the first part of backward makes leaves in the second.
        after = max(after, known.second)
    return known.window(group.phase, after)
