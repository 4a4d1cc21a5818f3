"""One collective for several: their inputs laid end to end, and the results cut out again.

A reduce_scatter's input has a row per rank, and so has what an all_gather makes. Each member of a
bucket is seen as such rows (one, where there are no ranks to tell apart), the rows of all members
are joined, and a member is a range of columns in what comes back. Every kind of backend can do
that, NCCL and gloo alike; gloo's own coalesced reduce_scatter sends its members one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.codegen.collectives import SENT, Sent
from autopar.ir.buckets import BUCKET_BYTES
from autopar.runtime.process.spots import FOR

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default
MEMBERS = "members"
"""Where the meta of a collective's node has how many tensors it carries."""


def sent_by(node: fx.Node) -> Sent | None:
    """What `node` sends, if it is a collective that may share a bucket."""
    return node.meta.get(SENT)


@dataclass
class Bucket:
    """Collectives of one kind, axis and dtype, nodes of the graph that is rewritten."""

    members: list[fx.Node] = field(default_factory=list)
    num_bytes: int = 0

    def takes(self, node: fx.Node) -> bool:
        """Whether there is room for another member."""
        return not self.members or self.num_bytes + node.meta[SENT].num_bytes <= BUCKET_BYTES

    @property
    def is_full(self) -> bool:
        """Whether there is room for nothing more."""
        return self.num_bytes >= BUCKET_BYTES

    def add(self, node: fx.Node) -> None:
        self.members.append(node)
        self.num_bytes += node.meta[SENT].num_bytes

    def issue(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> fx.Node:
        """The one collective, in `graph`, for `inputs` there, one per member."""
        first = self.members[0]
        given = inputs[0]
        if len(inputs) > 1:
            rows = _rows(first)[0]
            flat = [graph.call_function(aten.reshape.default, (x, [rows, -1])) for x in inputs]
            given = graph.call_function(aten.cat.default, (flat, 1))
        target: Any = first.target
        issued = graph.call_function(target, (given, *first.args[1:]))
        issued.meta[MEMBERS] = len(inputs)
        if FOR in first.meta:
            more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
            issued.meta[FOR] = f"{first.meta[FOR]}{more}"
        return issued

    def pieces(self, graph: fx.Graph, landed: fx.Node) -> dict[fx.Node, BucketPiece]:
        """Per member, how to cut its result out of what the collective made."""
        if len(self.members) == 1:
            return {self.members[0]: BucketPiece(graph, landed)}
        found: dict[fx.Node, BucketPiece] = {}
        start = 0
        for node in self.members:
            before, after = _rows(node)
            shape = list(node.meta[SENT].shape)
            columns = prod(shape) // before
            if before != after:
                shape[0] = shape[0] * after // before
            found[node] = BucketPiece(graph, landed, (start, start + columns), shape)
            start += columns
        return found


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """One member's part of a bucket's result; None for bounds where it is all of it."""

    graph: fx.Graph
    landed: fx.Node
    bounds: tuple[int, int] | None = None
    shape: Sequence[int] = ()

    def cut(self) -> fx.Node:
        """The member's result, contiguous."""
        if self.bounds is None:
            return self.landed
        start, end = self.bounds
        part = self.graph.call_function(aten.slice.Tensor, (self.landed, 1, start, end))
        if end - start == 1:
            # Of a single column reshape makes a view, which some kernels read as if it had no gaps.
            part = self.graph.call_function(aten.contiguous.default, (part,))
        return self.graph.call_function(aten.reshape.default, (part, list(self.shape)))


def _rows(node: fx.Node) -> tuple[int, int]:
    """Rows of a member's input and of its result."""
    if node.target is c10d.reduce_scatter_tensor.default:
        return _int(node.args[2]), 1
    if node.target is c10d.all_gather_into_tensor.default:
        return 1, _int(node.args[1])
    return 1, 1


def _int(arg: Any) -> int:
    return arg
