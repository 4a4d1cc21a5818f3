"""What one node does on one rank: FLOPs, bytes moved, seconds.

Pointwise ops and reductions that feed one another are one kernel, as a compiler makes them: a
fusible op reads what no fusible op of its phase made, and writes what anyone but a fusible op of
its phase needs. Matmuls, attention and lookups read and write all of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model.roofline import op_s
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.ir.mesh import Device
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, root_of
from autopar.rules.work import busiest_work, fuses, inner_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which tensor inputs a node reads from memory, and which outputs it writes there."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


def is_fusible(node: Node) -> bool:
    """Whether a backend makes one kernel of this op and its like neighbours."""
    return node.role is Role.OP and fuses(node.op)


def traffic(graph: Graph, groups: Sequence[Group]) -> Mapping[int, Traffic]:
    """Per op that is not a view: what it reads and writes."""
    users: dict[Ref, set[tuple[int, Phase]]] = {}
    for group in groups:
        phase = graph.nodes[group.root.node].phase
        users.setdefault(group.root, set()).update((use.node, phase) for use in group.uses)
    found: dict[int, Traffic] = {}
    for node in graph.with_role(Role.OP):
        if node.view:
            continue
        reads = tuple(_reads(graph, node, ref) for ref in node.inputs)
        writes = tuple(
            _writes(graph, node, {use for use, _ in users.get(Ref(node.index, o), ())})
            for o in range(len(node.outputs))
        )
        found[node.index] = Traffic(reads, writes)
    return found


def _reads(graph: Graph, node: Node, ref: Ref) -> bool:
    maker = graph.nodes[root_of(graph, ref)[0].node]
    return not (is_fusible(node) and is_fusible(maker) and maker.phase is node.phase)


def _writes(graph: Graph, node: Node, users: set[int]) -> bool:
    if not is_fusible(node):
        return True
    others = (graph.nodes[index] for index in users)
    return any(not is_fusible(user) or user.phase is not node.phase for user in others)


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
    A fusible op that touches no memory of its own is part of another kernel and costs nothing."""
    moved = sum(
        local_bytes(tensor, graph.atoms, sharding, sizes)
        for touched, tensor, sharding in zip(
            (*work.reads, *work.writes),
            (*graph.input_types(node), *node.outputs),
            (*shardings[0], *shardings[1]),
            strict=True,
        )
        if touched
    )
    moved += 2 * inner_bytes(graph, node, choice, sizes)
    if is_fusible(node):
        if not moved:
            return 0.0
        launch_s = device.launch_s if any(work.writes) else 0.0
        return op_s(0.0, moved, "float32", device) - device.launch_s + launch_s
    dtype = graph.type_of(node.inputs[0]).dtype if node.inputs else "float32"
    done = busiest_work(graph, node, choice, sizes)
    found_s = op_s(done.flops, moved * done.passes, dtype, device)
    if done.merges:
        merge_s = op_s(0.0, done.merged_bytes, dtype, device)
        found_s += done.merges * (done.merge_launches * device.launch_s + merge_s)
    return found_s
