"""The pass that gathers parameters in buckets, one bucket ahead of their use."""

from __future__ import annotations

from torch import fx

from autopar.codegen.bucketing import WAIT, Bucket, BucketPiece, sent_by
from autopar.runtime.program.lean import LeanGraph


def bucket_gathers(graph: fx.Graph) -> fx.Graph:
    """Join the gathers of parameters, in the order of their first use. A bucket is issued when the
    one before it is waited for, so that it is under way while that one is computed with."""
    if not any(_enters(node) for node in graph.nodes):
        return graph
    return _Rewriter(graph).run()


def _enters(node: fx.Node) -> bool:
    sent = sent_by(node)
    return sent is not None and not sent.leaves


class _Rewriter:
    """Copies the graph in order, but for what leads to a gather: that is copied when its bucket is
    issued."""

    def __init__(self, old: fx.Graph) -> None:
        self.old, self.new = old, LeanGraph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.pieces: dict[fx.Node, BucketPiece] = {}
        self.issued: dict[int, fx.Node] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[fx.Node, int] = {}
        self.next: dict[int, int] = {}
        self._assign()

    def _assign(self) -> None:
        """Buckets by kind, axis, dtype, and how many gathers stand before: one bucket never needs
        what another that needs it makes."""
        depths: dict[fx.Node, int] = {}
        last: dict[tuple[object, ...], int] = {}
        for node in self.old.nodes:
            before = max((depths[source] for source in node.all_input_nodes), default=0)
            depths[node] = before + _enters(node)
            sent = sent_by(node)
            if sent is None or sent.leaves:
                continue
            key = node.target, node.args[1:], sent.dtype, before
            if key not in last or not self.buckets[last[key]].takes(node):
                self.buckets.append(Bucket())
                if key in last:
                    self.next[last[key]] = len(self.buckets) - 1
                last[key] = len(self.buckets) - 1
            self.buckets[last[key]].add(node)
            self.bucket_of[node] = last[key]

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            self._copy(node)
        return self.new

    def _copy(self, node: fx.Node) -> None:
        """`node` and what it needs, if it is not there."""
        if node in self.copies:
            return
        if _enters(node):
            self._issue(self.bucket_of[node])
            return
        for source in node.all_input_nodes:
            self._copy(source)
        source = node.all_input_nodes[0] if node.target is WAIT else None
        if source is not None and _enters(source):
            self._land(self.bucket_of[source])
            self.copies[node] = self.pieces[source].cut()
        else:
            self.copies[node] = self.new.node_copy(node, self.copies.__getitem__)

    def _issue(self, index: int) -> None:
        if index in self.issued:
            return
        bucket = self.buckets[index]
        inputs: list[fx.Node] = []
        for node in bucket.members:
            (source,) = node.all_input_nodes
            self._copy(source)
            inputs.append(self.copies[source])
        self.issued[index] = bucket.issue(self.new, inputs)

    def _land(self, index: int) -> None:
        """Wait for a bucket, if nothing has, with the next one under way."""
        bucket = self.buckets[index]
        if bucket.members[0] in self.pieces:
            return
        if index in self.next:
            self._issue(self.next[index])
        landed = self.new.call_function(WAIT, (self.issued[index],))
        self.pieces |= bucket.pieces(self.new, landed)
