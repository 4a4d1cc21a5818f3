"""What an op computes, by its record."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, num_shards
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.redistribute import local_bytes, local_shape
from autopar.ir.sharding import Sharding
from autopar.rules.op import Shapes, Work
from autopar.rules.table import record_of


def is_contraction(op: str) -> bool:
    """Whether the arithmetic of an op may take longer than its memory traffic."""
    return record_of(op).flops is not None


def fuses(op: str) -> bool:
    """Whether a backend makes one kernel of an op and its like neighbours, if it does not draw
    random numbers."""
    return not (is_contraction(op) or record_of(op).lookup)


def reduces(node: Node) -> bool:
    """Whether an op that fuses takes sums, or the like, over a dim of what it reads."""
    if record_of(node.op).row_reductions:
        return True
    factors = (factor for factor in node.factors if not factor.members)
    return any(any(f.inputs) and None in f.outputs for f in factors)


def flops(node: Node, graph: Graph) -> float:
    """Floating-point operations of `node` on all devices together, two per multiplication and
    addition."""
    count = record_of(node.op).flops
    return count(node, graph) if count else float(sum(prod(t.shape) for t in node.outputs))


def busiest_work(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> Work:
    """What the rank that has most of `node` computes under `choice` on a mesh of `sizes`."""
    work = record_of(node.op).work
    if work is None:
        return Work(flops(node, graph) / num_shards(node, choice, sizes))
    return work(graph, node, choice, sizes)


def inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes on one rank of what `node` makes on the way to its outputs."""
    made = record_of(node.op).inner_bytes
    return made(graph, node, choice, sizes) if made else 0


def read_bytes(
    graph: Graph,
    node: Node,
    shardings: tuple[Sequence[Sharding], Sequence[Sharding]],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Bytes that `node` reads of each tensor input on one rank, whose inputs and outputs are in
    these `shardings`: all of it, or what is picked from it and no more."""
    types = graph.input_types(node), node.outputs
    pairs = tuple(zip(types[0], shardings[0], strict=True))
    held = [local_bytes(tensor, graph.atoms, sharding, sizes) for tensor, sharding in pairs]
    reads = record_of(node.op).reads
    if reads is not None:
        local = (
            tuple(
                local_shape(tensor, graph.atoms, sharding, sizes)
                for tensor, sharding in zip(side, states, strict=True)
            )
            for side, states in zip(types, shardings, strict=True)
        )
        whole = (tuple(tensor.shape for tensor in side) for side in types)
        for position, elements in reads(Shapes(*whole, *local)).items():
            held[position] = min(held[position], elements * itemsize(types[0][position].dtype))
    return tuple(held)
