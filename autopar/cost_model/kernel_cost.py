"""The cost of one node on one rank: FLOPs, bytes moved, seconds, and launches by the host.

Pointwise ops and reductions that feed one another are one kernel where they are compiled: a fusible
op reads from memory what no fusible op of its phase made. It writes what any but a fusible op of
its phase needs. Matmuls, attention, embedding lookups and random ops read and write memory on their
own, and so does every op that runs eagerly. An op that picks rows of a table reads those rows alone
(`rules.work.read_bytes`). States of generators are on the host, and cost nothing. A view moves
nothing, but a CPU in eager mode calls it like any other op: it counts with the op that reads it
first.
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
"""Seconds per element of a mask: a CPU's generator makes one number after the other, on one thread
(measured: torch 2.13, EPYC; uniform numbers take half)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Memory traffic of a node: which tensor inputs it reads from memory, and which outputs it
    writes there. `views` is the number of views that are called for it. It runs `alone` if it is
    not fused with its neighbours."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    views: int = 0
    alone: bool = False


def is_fusible(node: Node) -> bool:
    """Whether a compiler fuses this op with fusible neighbours. It does not fuse random ops, which
    are kernels of torch."""
    return node.role is Role.OP and fuses(node.op) and not node.random


def traffic(graph: Graph, *, fused: bool) -> Mapping[int, Traffic]:
    """Memory traffic per op that is no view, with fusible ops `fused` or each on its own."""
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
    """The first op that reads each view, directly or through other views."""
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
    """Nanoseconds of `node` on one rank, as in `node_s`. Then the exchanges it sends while it runs,
    each with the nanoseconds by which it makes the op longer (`moves.sent`). Last the nanoseconds
    in which the host launches it."""
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
    """Seconds of `node` on one rank under `choice`, with its input and output `shardings`. A
    fusible op without memory traffic is part of another kernel, and costs only random numbers."""
    kernel_s = _kernel_s(graph, node, work, choice, shardings, sizes, device)
    return kernel_s + _drawn_s(node, device) + work.views * device.view_s


def _drawn_s(node: Node, device: Device) -> float:
    """Seconds of drawing random numbers, beside memory. Every rank draws all of them."""
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
    """Bytes read and written to zero the rows of other ranks in the output of a lookup in a sharded
    table (`codegen.ops.embedding_lookup`). A compiler fuses that into the lookup."""
    record = record_of(node.op)
    if not (record.embedding_lookup and record.reads and exchange_axes(node, choice)):
        return 0
    return 2 * local_bytes(node.outputs[0], graph.atoms, outputs[0], sizes)


def _contraction_s(
    graph: Graph, node: Node, done: Work, num_elements: int, moved: int, device: Device
) -> float:
    """Seconds of an op that makes `num_elements` elements and moves `moved` bytes. An op of several
    matmuls without shapes is priced as one of all their elements."""
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
    if done.copied_bytes:
        kernel_s += stream_s(done.copied_bytes, device)
    return kernel_s


def bandwidth_part(node: Node, device: Device) -> float:
    """The part of the memory's bandwidth that a fusible op reaches. Reductions of backward also sum
    over rows, whose elements lie far apart."""
    if not reduces(node):
        return device.kernels.pointwise
    backward = node.phase is Phase.BACKWARD
    return device.kernels.reduction_backward if backward else device.kernels.reduction


# The time in which the host of a GPU launches kernels and collectives, one after the other.
#
# A CPU launches its own kernels, which is part of their prices (`mesh.Device.floor_s`). The
# optimizer's launches are not counted: they are the same for every plan, and come last.


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
    """The number of kernels that a rank launches for an op: 0 for an op that is a part of another
    op's kernel (`kernel_cost`)."""
    if is_fusible(node):
        return int(any(done.writes))
    work = busiest_work(graph, node, choice, sizes)
    passes = work.passes if work.matmuls is None else sum(p.count for p in work.matmuls)
    return passes + work.merges * work.merge_launches
