"""Which collectives share a message, for pricing and code generation alike.

A collective costs a latency however little it sends, and gradients and parameters are many and
often small. Nothing in a step waits for one gradient or makes one parameter, so that they need not
travel one by one: what brings gradients into their storage, and what gathers parameters, goes in
*buckets* of one kind, mesh axis and dtype, laid end to end in one buffer. How large a bucket grows,
counted on the side that is not sharded, is the axis' (`mesh.Axis.bucket_bytes`); a larger tensor
goes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Ref, Role, per_graph
from autopar.ir.redistribute import Collective
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunked_dim
from autopar.ir.uses import Group

_KINDS = frozenset({"all_gather", "all_reduce", "reduce_scatter"})
"""The collectives that can share a message."""


def can_share(move: Collective, source: Sharding) -> bool:
    """Whether a step from `source` can share a message: chunks, which may be uneven, travel alone,
    also where they only are summed."""
    return move.kind in _KINDS and not move.chunks and chunked_dim(source) is None


def is_bucketed(graph: Graph, group: Group) -> bool:
    """Whether the redistributions of the group's tensor, those that can, go in buckets: those of a
    parameter or a copy of one, and those of a gradient that is used for nothing else."""
    casts = casts_of(graph)
    return casts.of_parameter(graph, group) or casts.of_gradient(graph, group)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the tensors of a graph share latencies: all buckets together have `total_bytes`, and
    none has more than `members`.

    Prices are of one tensor at a time, so that what a bucket costs is spread over its members, by
    bytes, but evenly over tiny ones. Where all parameters take the same path, the sum is what the
    buckets cost. Where their paths differ, each further kind, axis and dtype costs up to one
    latency per phase more than is priced.
    """

    total_bytes: int
    members: int

    def latency_share(self, num_bytes: int, bucket_bytes: int) -> float:
        """What part of the latency of a bucket of up to `bucket_bytes` a tensor bears, whose larger
        side has `num_bytes` (or of many tensors, in an array)."""
        full = max(1, min(bucket_bytes, self.total_bytes))
        return np.minimum(1.0, np.maximum(num_bytes / full, 1 / self.members))


@per_graph
def sharing(graph: Graph) -> Sharing:
    """The parameters of `graph` and their gradients fill its buckets, in the smallest dtype that
    each is cast to."""
    sizes = {node.index: node.outputs[0].num_bytes for node in graph.with_role(Role.PARAM)}
    for copy, param in casts_of(graph).copies.items():
        sizes[param] = min(sizes[param], graph.type_of(Ref(copy)).num_bytes)
    return Sharing(sum(sizes.values()), max(1, len(sizes)))
