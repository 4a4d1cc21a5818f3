"""What saving costs beside memory where kernels are fused, in the problem that is open about it.

What an optional copy makes is read by its like in the same kernel, and what its original makes may
never be written. Where it is saved instead, the kernel that makes it writes it, and those that read
it in backward do. Readers that are optional copies themselves are not counted: they may not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.kernel_cost import Traffic, bandwidth_part, is_fusible
from autopar.cost_model.moves import to_ns
from autopar.cost_model.roofline import pointwise_s
from autopar.cost_model.rounding import Rounding, where_saved
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.copies import is_optional, original_key
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.mesh import Device, Mesh
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that writes an output, or reads it, where it is saved. It is one that there would
    not be else if it `starts`."""

    key: str
    output: int
    place: WindowPlace | None
    part: float
    starts: bool = False


def add_saved_traffic(
    rounding: Rounding,
    mesh: Mesh,
    device: Device,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    work: Mapping[int, Traffic],
    costs: Mapping[str, IntArray],
    windows: Windows,
) -> None:
    """Adds to the `costs` of saving what optional copies would make again, and to `windows`. What
    is rounded is written and read as it was rounded alone, which is priced there (`rounding`)."""
    graph = rounding.graph
    number = {key: i for i, key in enumerate(table)}
    plain = [group for group in all_groups if not rounding.rounds(group.root)]
    found = Counter((*_writers(graph, mesh, device, work), *_readers(graph, mesh, device, plain)))
    for kernel, count in found.items():
        ns = _kernel_ns(graph, mesh, device, table[kernel.key], kernel)
        launched = np.where(ns > 0, to_ns(device.host_launch_s) if kernel.starts else 0, 0)
        costs[kernel.key][:] += graph.turns * count * (ns + launched)
        hidden = windows.hiding.computed(ns), windows.hiding.launched(launched)
        windows.add_node(kernel.place, number[kernel.key], *hidden, count=count)


def _writers(
    graph: Graph, mesh: Mesh, device: Device, work: Mapping[int, Traffic]
) -> Iterator[_Kernel]:
    """The originals that nothing but their own kernel reads, for each of their copies."""
    known = blocks_of(graph, mesh)
    originals = {
        (node.key, node.module): node
        for node in graph.with_role(Role.OP)
        if node.phase is Phase.FORWARD
    }
    for copy in filter(_is_fused_copy, graph.nodes):
        original = originals[original_key(copy.key), copy.module]
        writes = work[original.index].writes
        for output, written in enumerate(writes):
            if not written:
                place = known.window_of(original)
                part = bandwidth_part(original, device)
                yield _Kernel(copy.key, output, place, part, starts=not any(writes))


def _readers(
    graph: Graph, mesh: Mesh, device: Device, all_groups: Sequence[Group]
) -> Iterator[_Kernel]:
    """The ops of backward that are certain, and in one kernel with a copy that they read."""
    known = blocks_of(graph, mesh)
    for group in all_groups:
        copy = graph.nodes[group.root.node]
        if _is_fused_copy(copy):
            for use in dict.fromkeys((use.node, use.arg) for use in group.uses):
                reader = graph.nodes[use[0]]
                if is_fusible(reader) and not is_optional(reader):
                    place, part = known.window_of(reader), bandwidth_part(reader, device)
                    yield _Kernel(copy.key, group.root.output, place, part)


def _is_fused_copy(node: Node) -> bool:
    return is_optional(node) and is_fusible(node) and not node.view


def _kernel_ns(
    graph: Graph, mesh: Mesh, device: Device, entry: NodeClass, kernel: _Kernel
) -> IntArray:
    """Nanoseconds that a kernel takes for an output, per choice of the copy's node."""
    tensor = entry.node.outputs[kernel.output]

    def ns(state: Sharding) -> int:
        moved = local_bytes(tensor, graph.atoms, state, mesh.sizes)
        return to_ns(pointwise_s(moved, device, kernel.part, starts=kernel.starts))

    return where_saved(entry, kernel.output, ns)
