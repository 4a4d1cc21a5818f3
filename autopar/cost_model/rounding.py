"""What is saved in fewer bits than it has, in the problem that is open about what is recomputed.

There, what an optional copy makes is saved by a decision, and has no ops that round it and bring it
back (`ir.passes.rounding`), as it has once the step is settled. So that decision takes their time,
and the memory of what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_model.kernel_cost import is_fusible
from autopar.cost_model.moves import to_ns
from autopar.cost_model.roofline import pointwise_s
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import blocks_of
from autopar.ir.choices import Saved
from autopar.ir.graph import Node, Phase, Ref, Role, TensorType
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.passes.rounding import is_rounded
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.requests.request import PlanRequest


class Rounding:
    """What is rounded to `dtype` of what the step of a request with optional copies saves; nothing
    if that is ""."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.dtype = request.step, request.options.saved_dtype
        made = (n for n in self.graph.with_role(Role.OP) if n.phase is Phase.FORWARD and not n.view)
        self._originals = {(node.key, node.module): node for node in made} if self.dtype else {}

    def original(self, copy: Node) -> Node:
        """What an optional copy is one of."""
        return self._originals[original_key(copy.key), copy.module]

    def rounds(self, root: Ref) -> bool:
        """Whether a tensor is rounded if it is saved: of a copy, that of its original."""
        if not self.dtype:
            return False
        maker = self.graph.nodes[root.node]
        if is_optional(maker):
            root = Ref(self.original(maker).index, root.output)
        return is_rounded(self.graph, root)

    def saved_type(self, root: Ref) -> TensorType:
        """A tensor as it is saved."""
        tensor = self.graph.type_of(root)
        return replace(tensor, dtype=self.dtype) if self.rounds(root) else tensor


def add_rounding(
    rounding: Rounding,
    mesh: Mesh,
    device: Device,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    costs: Mapping[str, IntArray],
    windows: Windows,
    *,
    fused: bool,
) -> None:
    """Adds to the `costs` of saving what optional copies would recompute, and to `windows`."""
    graph, number = rounding.graph, {key: i for i, key in enumerate(table)}
    known = blocks_of(graph, mesh)
    forward = {g.root: g for g in all_groups if g.phase is Phase.FORWARD}
    for group in all_groups:
        copy = graph.nodes[group.root.node]
        if not is_optional(copy) or not rounding.rounds(group.root):
            continue
        original = rounding.original(copy)
        used = forward.get(Ref(original.index))
        last = max((use.node for use in used.uses), default=original.index) if used else None
        readers = [graph.nodes[use.node] for use in group.uses]
        is_read = not (fused and is_fusible(original))
        is_written = not (fused and all(is_fusible(r) for r in readers if not is_optional(r)))
        ends = (
            (graph.nodes[original.index if last is None else last], is_read, True),
            (readers[0], is_written, is_written),
        )
        for node, has_wide, starts in ends:
            ns = _cast_ns(rounding, mesh, device, table[copy.key], group.root, has_wide, starts)
            launched = np.where(ns > 0, to_ns(device.host_launch_s) * starts, 0)
            costs[copy.key][:] += graph.microbatches * (ns + launched)
            hidden = windows.hiding.computed(ns), windows.hiding.launched(launched)
            windows.add_node(known.window_of(node), number[copy.key], *hidden)


def _cast_ns(
    rounding: Rounding,
    mesh: Mesh,
    device: Device,
    entry: NodeClass,
    root: Ref,
    has_wide: bool,
    starts: bool,
) -> IntArray:
    """Nanoseconds of a cast, per choice of the copy's node, that touches what is rounded, and what
    it is of if it `has_wide`."""
    touched = rounding.saved_type(root), *[rounding.graph.type_of(root)] * has_wide

    def ns(state: Sharding) -> int:
        moved = sum(local_bytes(t, rounding.graph.atoms, state, mesh.sizes) for t in touched)
        return to_ns(pointwise_s(moved, device, device.kernels.pointwise, starts=starts))

    return where_saved(entry, root.output, ns)


def where_saved(entry: NodeClass, output: int, ns: Callable[[Sharding], int]) -> IntArray:
    """Per choice of a copy's node, the `ns` of the state that an output is saved in; else 0."""
    states = (c.states if isinstance(c, Saved) else () for c in entry.choices)
    return np.array([ns(some[output]) if some else 0 for some in states], np.int64)
