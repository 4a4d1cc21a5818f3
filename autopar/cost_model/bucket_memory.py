"""Bytes that buckets hold on top of a schedule that moves one tensor at a time.

`liveness` has a gradient as it was made live until the end, and a gathered parameter from its first
use. A bucket of gradients is joined while its members are still there, and reduced into a second
buffer. A bucket of gathers is held while its members are cut out of it, and the next one, which may
be a single larger tensor, is under way by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.ir.buckets import BUCKET_BYTES, can_share, is_bucketed
from autopar.ir.graph import Phase, Role
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import local_bytes, step
from autopar.ir.uses import Group
from autopar.plans.layout import Layout


def in_flight_bytes(layout: Layout, mesh: Mesh, all_groups: Sequence[Group]) -> int:
    """The most that either phase's buckets hold: an upper bound, since buckets of several kinds or
    axes need not be full at once."""
    graph = layout.graph
    sent: dict[tuple[Phase, bool, str, int, str], list[int]] = defaultdict(list)
    for group in all_groups:
        if not is_bucketed(graph, group):
            continue
        tensor = graph.type_of(group.root)
        enters = graph.nodes[group.root.node].role is Role.PARAM
        for source, target in layout.routes.get(group.key, ()):
            move = step(tensor, graph.atoms, source, target)
            if move is not None and can_share(move, source):
                larger = max(
                    local_bytes(tensor, graph.atoms, state, mesh.sizes)
                    for state in (source, target)
                )
                sent[group.phase, enters, move.kind, move.axis, tensor.dtype].append(larger)
    held = dict.fromkeys(Phase, 0)
    for (phase, enters, *_), sizes in sent.items():
        bucket = min(BUCKET_BYTES, sum(sizes)) if len(sizes) > 1 else 0
        following = max(bucket, max(sizes)) if enters and len(sizes) > 1 else bucket
        held[phase] += bucket + following
    return max(held.values())
