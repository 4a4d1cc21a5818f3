"""What attention does on the rank that has most of it.

Under a causal mask the rows of a sequence do unequal work: of n pieces of it the last has a share
of (2n - 1)/n^2, not 1/n (`attention.last_share`), and the step takes as long as its rank. Rows that
are not the first see earlier keys without a mask and their own block with one: two kernels, whose
results are merged. In a ring there is one kernel per block, whose results are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.cost_model.roofline import op_s
from autopar.ir.attention import BACKWARD, FORWARD, RING, is_causal, last_share, query_ways
from autopar.ir.choices import Choice, num_shards
from autopar.ir.graph import Graph, Node
from autopar.ir.intra_op import row_itemsize
from autopar.ir.mesh import Device
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding

FLOPS = {FORWARD: 4.0, BACKWARD: 10.0}
"""FLOPs per (batch, head, query, key, head dim): two matmuls forward, five backward (the scores are
computed again), as Dao et al., "FlashAttention" (2022), count them."""


def attention_flops(node: Node, graph: Graph) -> float:
    """Floating-point operations of the whole op; half of them where the mask is causal."""
    query, key = _shapes(node, graph)
    return FLOPS[node.op] * (0.5 if is_causal(node) else 1.0) * prod(query) * key[-2]


def attention_s(
    graph: Graph,
    node: Node,
    choice: Choice,
    shardings: tuple[tuple[Sharding, ...], tuple[Sharding, ...]],
    sizes: Sequence[int],
    moved: int,
    device: Device,
) -> float:
    """Seconds of an attention op on the busiest rank, whose local tensors have `moved` bytes."""
    dtype = graph.type_of(node.inputs[0]).dtype
    flops = attention_flops(node, graph) * _busiest_share(node, graph, choice, sizes)
    passed_on = _result_bytes(graph, node, shardings[1], sizes)
    if choice.axes_of((RING,)):
        steps = choice.ways((RING,), sizes)
        each_s = op_s(0.0, passed_on, dtype, device)
        kernels_s = op_s(flops, moved * steps, dtype, device)
        return kernels_s + (steps - 1) * (device.launch_s + each_s)
    if is_causal(node) and query_ways(choice, sizes) > 1:
        return op_s(flops, moved, dtype, device) + op_s(0.0, passed_on, dtype, device)
    return op_s(flops, moved, dtype, device)


def _shapes(node: Node, graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the queries and of the keys."""
    first = 0 if node.op == FORWARD else 1
    query, key = (graph.type_of(node.inputs[first + i]).shape for i in range(2))
    return query, key


def _busiest_share(node: Node, graph: Graph, choice: Choice, sizes: Sequence[int]) -> float:
    num = num_shards(node, choice, sizes)
    if not is_causal(node):
        return 1 / num
    query, key = _shapes(node, graph)
    ways = query_ways(choice, sizes)
    return last_share(query[-2], key[-2], ways) * ways / num


def _result_bytes(
    graph: Graph, node: Node, outputs: Sequence[Sharding], sizes: Sequence[int]
) -> int:
    """Bytes read and written to merge what one more kernel gives: it is read, and so is the sum,
    in the dtype of sums for what is one per query, and written."""
    found = 0
    for output, sharding in zip(node.outputs, outputs, strict=True):
        held = local_bytes(output, graph.atoms, sharding, sizes)
        summed = held
        if output is node.outputs[0]:
            summed = held * row_itemsize(output.dtype) * prod(output.shape) // output.num_bytes
        found += held + 2 * summed
    return found
