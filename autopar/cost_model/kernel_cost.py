"""What one node does on one rank: FLOPs, bytes moved, seconds, and launches by the host.

Pointwise ops and reductions that feed one another are one kernel where a compiler makes it: a
fusible op reads what no fusible op of its phase made, and writes what anyone but a fusible op of
its phase needs. Matmuls, attention, lookups and what draws random numbers read and write memory on
their own, and so does every op that runs eagerly. Of a table, an op that picks from it reads what
it picks (`rules.work.read_bytes`). States of generators are the host's, and take
nothing. A view moves nothing, but a CPU that runs ops one by one calls it like any other: it counts
with the op that reads it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cluster.kernels import LAUNCHES_PER_COLLECTIVE
from autopar.cost_model.moves import sent, to_ns
from autopar.cost_model.roofline import attention_s, matmul_s, pointwise_s, stream_s
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, itemsize, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import STATE
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import groups, root_of
from autopar.rules.op import Exchange, Work
from autopar.rules.table import record_of
from autopar.rules.work import (
    busiest_work,
    exchange_axes,
    fuses,
    inner_bytes,
    is_contraction,
    read_bytes,
    reduces,
)

DRAWN_ON_CPU_S = 6.6e-9
"""Seconds per element of a mask: the generator of a CPU makes one number after the other, on one
thread whatever there are (measured: torch 2.13, EPYC; of uniform numbers half)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which tensor inputs a node reads from memory, which outputs it writes there, how many
    `views` are made for it, and whether it runs `alone`, not compiled with its neighbours."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    views: int = 0
    alone: bool = False


def is_fusible(node: Node) -> bool:
    """Whether a backend makes one kernel of this op and its like neighbours: not where it draws
    random numbers, which torch's own kernel does."""
    return node.role is Role.OP and fuses(node.op) and not node.random


def traffic(graph: Graph, *, fused: bool) -> Mapping[int, Traffic]:
    """Per op that is not a view: what it reads and writes, `fused` with its like or on its own."""
    return _traffic_fused(graph) if fused else _traffic_alone(graph)


@per_graph
def _traffic_alone(graph: Graph) -> Mapping[int, Traffic]:
    views = Counter(_first_readers(graph).values())
    return {
        node.index: Traffic(
            tuple(_maker(graph, ref).op != STATE for ref in node.inputs),
            (node.op != STATE,) * len(node.outputs),
            views[node.index],
            alone=True,
        )
        for node in graph.with_role(Role.OP)
        if not node.view
    }


def _first_readers(graph: Graph) -> Mapping[int, int]:
    """For each view that an op reads, maybe through others, the first such op."""
    read = [
        (view, node.index)
        for node in graph.with_role(Role.OP)
        if not node.view
        for ref in node.inputs
        for view in root_of(graph, ref)[1]
    ]
    return dict(reversed(read))


@per_graph
def _traffic_fused(graph: Graph) -> Mapping[int, Traffic]:
    users = grouped((group.root, use.node) for group in groups(graph) for use in group.uses)
    return {
        node.index: Traffic(
            tuple(_reads(graph, node, ref) for ref in node.inputs),
            tuple(
                _writes(graph, node, users.get(Ref(node.index, output), ()))
                for output in range(len(node.outputs))
            ),
        )
        for node in graph.with_role(Role.OP)
        if not node.view
    }


def _reads(graph: Graph, node: Node, ref: Ref) -> bool:
    maker = _maker(graph, ref)
    is_joined = is_fusible(node) and is_fusible(maker) and maker.phase is node.phase
    return maker.op != STATE and not is_joined


def _maker(graph: Graph, ref: Ref) -> Node:
    return graph.nodes[root_of(graph, ref)[0].node]


def _writes(graph: Graph, node: Node, users: Sequence[int]) -> bool:
    if node.op == STATE:
        return False
    if not is_fusible(node):
        return True
    others = (graph.nodes[index] for index in users)
    return any(not is_fusible(user) or user.phase is not node.phase for user in others)


def op_ns(
    graph: Graph,
    node: Node,
    done: Traffic,
    choice: Choice,
    shardings: tuple[tuple[Sharding, ...], tuple[Sharding, ...]],
    mesh: Mesh,
    device: Device,
) -> tuple[int, Sequence[tuple[Exchange, int]], int]:
    """Nanoseconds of `node` on one rank, as in `node_s`; what it sends while it runs, with those of
    each by which it takes longer (`moves.sent`); and those in which the host launches it."""
    ns = to_ns(node_s(graph, node, done, choice, shardings, mesh.sizes, device))
    sends = sent(graph, node, choice, mesh, ns)
    return ns, sends, _host_ns(graph, node, done, choice, mesh.sizes, device, len(sends))


def node_s(
    graph: Graph,
    node: Node,
    work: Traffic,
    choice: Choice,
    shardings: tuple[tuple[Sharding, ...], tuple[Sharding, ...]],
    sizes: Sequence[int],
    device: Device,
) -> float:
    """Seconds of `node` on one rank under `choice`, whose input and output `shardings` are given.
    A fusible op that touches no memory of its own is part of another kernel and costs nothing but
    what it draws."""
    kernel_s = _kernel_s(graph, node, work, choice, shardings, sizes, device)
    return kernel_s + _drawn_s(node, device) + work.views * device.view_s


def _drawn_s(node: Node, device: Device) -> float:
    """What random numbers take beside memory. Every rank draws all of them."""
    if not node.random or device.kind != "cpu":
        return 0.0
    return DRAWN_ON_CPU_S * prod(node.outputs[0].shape)


def _kernel_s(
    graph: Graph,
    node: Node,
    work: Traffic,
    choice: Choice,
    shardings: tuple[tuple[Sharding, ...], tuple[Sharding, ...]],
    sizes: Sequence[int],
    device: Device,
) -> float:
    given = read_bytes(graph, node, shardings, sizes)
    moved = sum(num_bytes for read, num_bytes in zip(work.reads, given, strict=True) if read)
    moved += sum(
        local_bytes(tensor, graph.atoms, sharding, sizes)
        for written, tensor, sharding in zip(work.writes, node.outputs, shardings[1], strict=True)
        if written
    )
    moved += 2 * inner_bytes(graph, node, choice, sizes)
    if work.alone:
        moved += _masked_bytes(graph, node, choice, shardings[1], sizes)
    if is_fusible(node):
        if not moved:
            return 0.0
        return pointwise_s(moved, device, bandwidth_part(node, device), starts=any(work.writes))
    if not is_contraction(node.op):
        return device.floor_s(device.kernels.start_s) + stream_s(moved, device)
    num_elements = sum(
        local_bytes(tensor, graph.atoms, sharding, sizes) // itemsize(tensor.dtype)
        for tensor, sharding in zip(node.outputs, shardings[1], strict=True)
    )
    done = busiest_work(graph, node, choice, sizes)
    return _contraction_s(graph, node, done, num_elements, moved, device)


def _masked_bytes(
    graph: Graph, node: Node, choice: Choice, outputs: Sequence[Sharding], sizes: Sequence[int]
) -> int:
    """What is read and written to take the rows of other ranks out of what a lookup found in a part
    of the table (`codegen.ops.embedding_lookup`); a compiler does that before it writes them."""
    record = record_of(node.op)
    if not (record.embedding_lookup and record.reads and exchange_axes(node, choice)):
        return 0
    return 2 * local_bytes(node.outputs[0], graph.atoms, outputs[0], sizes)


def _contraction_s(
    graph: Graph, node: Node, done: Work, num_elements: int, moved: int, device: Device
) -> float:
    """An op that makes `num_elements` elements and moves `moved` bytes. One of several products is
    priced as one of all their sums."""
    dtype = graph.type_of(node.inputs[0]).dtype if node.inputs else "float32"
    moved *= done.passes
    if done.matmuls is not None:
        kernel_s = sum(
            each.count * matmul_s(each.out, each.depth, each.num_bytes, dtype, device)
            for each in done.matmuls
        )
    elif done.scores is not None:
        kernel_s = attention_s(done.flops, done.scores, moved, dtype, device)
    else:
        kernel_s = matmul_s(
            num_elements, done.flops / (2 * max(1, num_elements)), moved, dtype, device
        )
    if done.merges:
        start_s = done.merge_launches * device.floor_s(device.kernels.start_s)
        kernel_s += done.merges * (start_s + stream_s(done.merged_bytes, device))
    return kernel_s


def bandwidth_part(node: Node, device: Device) -> float:
    """The part of the memory's bandwidth that a fusible op reaches. Backward sums over rows, whose
    elements lie far apart, beside what it needs of each row."""
    if not reduces(node):
        return device.kernels.pointwise
    backward = node.phase is Phase.BACKWARD
    return device.kernels.reduction_backward if backward else device.kernels.reduction


# What the host of a GPU does for an op: it launches kernels and collectives, one after the other.
#
# A CPU launches its own kernels, which is part of their prices (`mesh.Device.floor_s`). What the
# optimizer launches is not counted: it is the same for every plan, and comes when all else is done.


def _host_ns(
    graph: Graph,
    node: Node,
    done: Traffic,
    choice: Choice,
    sizes: Sequence[int],
    device: Device,
    num_sent: int,
) -> int:
    """Nanoseconds in which the host launches an op that sends `num_sent` collectives."""
    if not device.host_launch_s:
        return 0
    launches = _kernels(graph, node, done, choice, sizes) + LAUNCHES_PER_COLLECTIVE * num_sent
    return to_ns(launches * device.host_launch_s)


def _kernels(graph: Graph, node: Node, done: Traffic, choice: Choice, sizes: Sequence[int]) -> int:
    """How many kernels a rank launches for an op: none of its own for one that is a part of
    another's (`kernel_cost`)."""
    if is_fusible(node):
        return int(any(done.writes))
    work = busiest_work(graph, node, choice, sizes)
    passes = work.passes if work.matmuls is None else sum(p.count for p in work.matmuls)
    return passes + work.merges * work.merge_launches
