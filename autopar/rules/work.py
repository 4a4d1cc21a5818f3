"""What an op computes, by its record."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, num_shards
from autopar.ir.graph import Graph, Node
from autopar.rules.op import Work
from autopar.rules.table import OPS


def is_contraction(op: str) -> bool:
    """Whether the arithmetic of an op may take longer than its memory traffic."""
    record = OPS.get(op)
    return record is not None and record.flops is not None


def fuses(op: str) -> bool:
    """Whether a backend makes one kernel of an op and its like neighbours."""
    record = OPS.get(op)
    return record is None or (record.flops is None and not record.lookup)


def flops(node: Node, graph: Graph) -> float:
    """Floating-point operations of `node` on all devices together, two per multiplication and
    addition."""
    record = OPS.get(node.op)
    if record is None or record.flops is None:
        return float(sum(prod(tensor.shape) for tensor in node.outputs))
    return record.flops(node, graph)


def busiest_work(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> Work:
    """What the rank that has most of `node` computes under `choice` on a mesh of `sizes`."""
    record = OPS.get(node.op)
    if record is None or record.work is None:
        return Work(flops(node, graph) / num_shards(node, choice, sizes))
    return record.work(graph, node, choice, sizes)


def inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes on one rank of what `node` makes on the way to its outputs."""
    record = OPS.get(node.op)
    if record is None or record.inner_bytes is None:
        return 0
    return record.inner_bytes(graph, node, choice, sizes)
