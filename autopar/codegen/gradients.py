"""The pass that sends gradients off in buckets, as soon as one is full."""

from __future__ import annotations

from torch import fx

from autopar.codegen.bucketing import WAIT, Bucket, sent_by
from autopar.runtime.program.lean import LeanGraph

MAX_UNDER_WAY = 2
"""How many full buckets are under way: each holds its input and its result."""


def bucket_gradients(graph: fx.Graph) -> fx.Graph:
    """Join the collectives of gradients on their way out of the graph, in the order in which they
    become ready. A bucket is issued once it is full, and waited for when `MAX_UNDER_WAY` further
    ones have been issued, or at the end."""
    if not any(_leaves(node) for node in graph.nodes):
        return graph
    return _Rewriter(graph).run()


def _leaves(node: fx.Node) -> bool:
    sent = sent_by(node)
    return sent is not None and sent.leaves


class _Rewriter:
    """Copies the graph in order. What needs a result that has not come is parked until it has."""

    def __init__(self, old: fx.Graph) -> None:
        self.old, self.new = old, LeanGraph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.parked: list[fx.Node] = []
        self.open: dict[tuple[object, ...], Bucket] = {}
        self.under_way: list[tuple[Bucket, fx.Node]] = []

    def run(self) -> fx.Graph:
        output = self.old.output_node()
        for node in self.old.nodes:
            if node is not output:
                self._visit(node)
        while self.open or self.under_way:
            for key in list(self.open):
                self._issue(key)
            while self.under_way:
                self._land()
        self.copies[output] = self.new.node_copy(output, self.copies.__getitem__)
        return self.new

    def _visit(self, node: fx.Node) -> None:
        if node in self.copies:
            return
        if any(source not in self.copies for source in node.all_input_nodes):
            self.parked.append(node)
        elif _leaves(node):
            self._add(node)
        else:
            self.copies[node] = self.new.node_copy(node, self.copies.__getitem__)

    def _add(self, node: fx.Node) -> None:
        sent = sent_by(node)
        assert sent is not None
        key = node.target, node.args[1:], sent.dtype
        if key in self.open and not self.open[key].takes(node):
            self._issue(key)
        self.open.setdefault(key, Bucket()).add(node)
        if self.open[key].is_full:
            self._issue(key)

    def _issue(self, key: tuple[object, ...]) -> None:
        bucket = self.open.pop(key)
        inputs = [self.copies[node.all_input_nodes[0]] for node in bucket.members]
        self.under_way.append((bucket, bucket.issue(self.new, inputs)))
        if len(self.under_way) > MAX_UNDER_WAY:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest bucket, and copy what waited for it."""
        bucket, issued = self.under_way.pop(0)
        landed = self.new.call_function(WAIT, (issued,))
        for node, piece in bucket.pieces(self.new, landed).items():
            (wait,) = node.users
            self.copies[wait] = piece.cut()
        parked, self.parked = self.parked, []
        for node in parked:
            self._visit(node)
