"""What forward hands to backward in the memory of the host.

A tensor that is offloaded is copied to the host after its last use in forward, and back before its
first in backward. A copy hides behind what other blocks compute. So what is last used in one of the
last blocks of forward, or needed in one of the first of backward, stays on the device, though its
class is offloaded: no more than `AHEAD` blocks' tensors are on their way in either direction. What
leaves the graph stays too: it is held anyway. So do states of generators, which are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.casts import casts_of
from autopar.ir.copies import is_optional
from autopar.ir.draws import STATE
from autopar.ir.graph import OUTPUT_ROLES, Graph, Phase, Ref, Role
from autopar.ir.mesh import Mesh
from autopar.ir.uses import groups, is_saved, root_key

AHEAD = 2
"""An offload is over when so many blocks are, that in which it starts and the next; a reload starts
at most so many blocks ahead of the one that needs it."""


class Away(NamedTuple):
    """A tensor that is on the host between op `last` of forward, which makes it or is the last to
    read it, and op `first` of backward, the first to read it."""

    root: Ref
    last: int
    first: int


def offloadable(graph: Graph, mesh: Mesh) -> Mapping[str, tuple[Away, ...]]:
    """Per class of activations (`uses.root_key`) those of its tensors that are away when it is
    offloaded, in order; classes of which none would be are left out. Where it is open whether one
    is made again (`again.with_options`), it is read where its copy is."""
    blocks, copies = blocks_of(graph, mesh).of, casts_of(graph).copies
    made = {n.name: n.index for n in graph.with_role(Role.OP) if n.phase is Phase.FORWARD}
    num_blocks = len(blocks_of(graph, mesh).windows[Phase.FORWARD])
    found = groups(graph)
    forward = {group.root: group for group in found if group.phase is Phase.FORWARD}
    away: dict[str, list[Away]] = defaultdict(list)
    for group in found:
        root, maker = group.root, graph.nodes[group.root.node]
        if is_optional(maker):
            root = Ref(made[maker.name], root.output)
        elif not is_saved(graph, group) or root.node in copies or maker.op == STATE:
            continue
        used = forward[root].uses if root in forward else ()
        users = [use.node for use in (*used, *group.uses)]
        if any(graph.nodes[user].role in OUTPUT_ROLES for user in users):
            continue
        last = max((root.node, *(use.node for use in used)))
        first = min(use.node for use in group.uses)
        if blocks[last] + AHEAD < num_blocks and blocks[first] >= AHEAD:
            away[root_key(graph, root)].append(Away(root, last, first))
    return {key: tuple(away[key]) for key in sorted(away)}


def copied_in(
    graph: Graph, mesh: Mesh, away: Away
) -> tuple[WindowPlace | None, WindowPlace | None]:
    """What hides the copies: that to the host the block after the last use, that back the block
    before the first."""
    known = blocks_of(graph, mesh)
    return (
        known.window(Phase.FORWARD, known.of[away.last] + 1),
        known.window(Phase.BACKWARD, known.of[away.first] - 1),
    )


def offloaded(graph: Graph, mesh: Mesh, keys: Collection[str]) -> tuple[Away, ...]:
    """What is away when the classes `keys` are offloaded. ValueError if one of them cannot be."""
    if not keys:
        return ()
    known = offloadable(graph, mesh)
    unknown = sorted(set(keys) - known.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be offloaded")
    return tuple(away for key in sorted(keys) for away in known[key])
