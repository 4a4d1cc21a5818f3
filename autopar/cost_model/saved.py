"""The shardings that activations are saved in, and the cost of saving beside memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from autopar.cost_model.flows import consumer_states, source_states
from autopar.cost_model.kernel_cost import Traffic, bandwidth_part, is_fusible
from autopar.cost_model.limits import Limits
from autopar.cost_model.moves import to_ns
from autopar.cost_model.network import closure
from autopar.cost_model.roofline import pointwise_s
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import Saved
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, TensorType, per_graph
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.passes.rounding import is_rounded
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, Group, root_key
from autopar.plans.requests.request import PlanRequest

_MAX_SAVED = 64
"""The most combinations of shardings in which several outputs of an op may be saved."""


def decision_key(node: Node) -> str:
    """The key in a problem of the decision on the class of `node`; for an optional copy, of the
    decision on saving its original."""
    return SAVED + original_key(node.key) if is_optional(node) else node.key


def saved_states(
    graph: Graph,
    mesh: Mesh,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    owners: Mapping[str, str],
    limits: Limits,
    offloaded: Collection[str] = (),
) -> dict[str, tuple[Sharding | None, ...]]:
    """Per class of activations that backward reads, the shardings they may be saved in: those that
    their forward groups can reach and that are not partial. Where only optional copies read them,
    None (not saved) is one more. On one device there is one sharding: only the latter classes, and
    those in `offloaded`, which may be offloaded, have something to decide."""
    ends: dict[str, set[Sharding]] = {}
    roots: dict[str, Group] = {}
    certain = _read_for_certain(graph, all_groups)
    for group in reversed({group.key: group for group in reversed(all_groups)}.values()):
        root, key = graph.nodes[group.root.node], root_key(graph, group.root)
        is_open = group.crosses and group.phase is Phase.FORWARD and root.role is Role.OP
        if is_open and (mesh.axes or key in offloaded or key not in certain):
            source = {s for s in source_states(table[root.key], group) if s is not None}
            targets = (
                s for _, states in consumer_states(graph, group, table, owners) for s in states
            )
            ends.setdefault(key, source).update(s for s in targets if s is not None)
            roots.setdefault(key, group)
    return {
        key: (
            *_storable(graph, mesh, limits, roots[key].root, states),
            *(() if key in certain else (None,)),
        )
        for key, states in ends.items()
    }


def _storable(
    graph: Graph, mesh: Mesh, limits: Limits, root: Ref, ends: Collection[Sharding]
) -> tuple[Sharding, ...]:
    """The shardings that an activation may be saved in, of those between `ends`."""
    tensor = graph.type_of(root)
    states = closure(tensor, graph.atoms, sorted(ends), mesh.sizes)
    whole = tuple(state for state in states if not state.has_partial)
    return limits.saved_states(root_key(graph, root), tensor, whole)


def _read_for_certain(graph: Graph, all_groups: Sequence[Group]) -> frozenset[str]:
    """The classes of tensors that backward reads in ops that are no optional copies."""
    return frozenset(
        root_key(graph, group.root)
        for group in all_groups
        if group.phase is Phase.BACKWARD
        and not all(is_optional(graph.nodes[use.node]) for use in group.uses)
    )


def with_savings(
    graph: Graph,
    mesh: Mesh,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    owners: Mapping[str, str],
    limits: Limits,
    offloaded: Collection[str] = (),
) -> dict[str, NodeClass]:
    """`table` with more choices for optional copies: not to recompute, but to save the original's
    outputs, or nothing if no op reads them. Outputs are saved in any sharding in which the original
    makes them or a reader in backward needs them, or between these. Outputs of ops with keys in
    `offloaded` may be offloaded."""
    widened = dict(table)
    ends: dict[tuple[str, int], set[Sharding]] = {}
    for group in {group.key: group for group in reversed(all_groups)}.values():
        maker = graph.nodes[group.root.node]
        if is_optional(maker):
            states = ends.setdefault((maker.key, group.root.output), set())
            consumers = consumer_states(graph, group, table, owners)
            states.update(s for _, targets in consumers for s in targets if s is not None)
    for key, entry in table.items():
        if not is_optional(entry.node):
            continue
        original = table[original_key(key)]
        output_states = map(original.output_states, range(len(entry.node.outputs)))
        per_output = [
            _storable(
                graph,
                mesh,
                limits,
                Ref(original.node.index, output),
                {s for s in states if s is not None} | ends.get((key, output), set()),
            )
            for output, states in enumerate(output_states)
        ]
        kept = [Saved(states) for states in _together(original, per_output)]
        if original.key in offloaded:
            kept += [replace(each, offloaded=True) for each in kept]
        more = (*kept, Saved())
        widened[key] = replace(
            entry,
            choices=(*entry.choices, *more),
            inputs=(*entry.inputs, *((),) * len(more)),
            outputs=(*entry.outputs, *(each.states for each in more)),
        )
    return widened


def _together(
    original: NodeClass, per_output: Sequence[tuple[Sharding, ...]]
) -> Iterator[tuple[Sharding, ...]]:
    """The shardings in which the outputs of an op may be saved together: every combination, or,
    where there are many, those in which the op makes them."""
    if len(per_output) == 1 or prod(map(len, per_output)) <= _MAX_SAVED:
        yield from product(*per_output)
    else:
        whole = (states for states in original.outputs if not any(s.has_partial for s in states))
        yield from dict.fromkeys(whole)


# The cost of saving beside memory, in the problem that decides what is recomputed.
#
# The output of an optional copy is saved by a decision. If it is saved in fewer bits, the graph has
# no ops yet that round it and convert it back (`ir.passes.rounding`): these come once all is
# decided. So the decision bears their time, and the memory is that of the rounded tensor.
#
# With fused kernels, fusible ops read the output of an optional copy in the kernel that recomputes
# it, and the original's output may never be written. If it is saved instead, the kernel that makes
# it writes it, and its readers in backward read it. Readers that are optional copies themselves do
# not count: they may not be computed.


class Rounding:
    """Which saved activations of a request with optional copies are rounded to `dtype`; none if
    that is ""."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.dtype = request.step, request.options.saved_dtype

    def rounds(self, root: Ref) -> bool:
        """Whether a tensor is rounded if it is saved; for an optional copy, its original."""
        if not self.dtype:
            return False
        maker = self.graph.nodes[root.node]
        if is_optional(maker):
            root = Ref(_original(self.graph, maker).index, root.output)
        return is_rounded(self.graph, root)

    def saved_type(self, root: Ref) -> TensorType:
        """The type of a tensor when it is saved."""
        tensor = self.graph.type_of(root)
        return replace(tensor, dtype=self.dtype) if self.rounds(root) else tensor


@per_graph
def _originals(graph: Graph) -> Mapping[tuple[str, str], Node]:
    ops = (node for node in graph.with_role(Role.OP) if node.phase is Phase.FORWARD)
    return {(node.key, node.module): node for node in ops}


def _original(graph: Graph, copy: Node) -> Node:
    """The op that an optional copy recomputes."""
    return _originals(graph)[original_key(copy.key), copy.module]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Memory traffic of `tensors` in the sharding that an output is saved in, at `part` of the
    bandwidth. It is a kernel of its own if it `starts`, else a part of another kernel."""

    key: str
    output: int
    place: WindowPlace | None
    tensors: tuple[TensorType, ...]
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
    *,
    fused: bool,
) -> None:
    """Adds the time of saving, instead of recomputing, to `costs` and `windows`. Rounded tensors
    are written and read in the rounded dtype alone."""
    graph = rounding.graph
    number = {key: i for i, key in enumerate(table)}
    plain = [group for group in all_groups if not rounding.rounds(group.root)]
    kernels = [*_casts(rounding, mesh, device, all_groups, fused=fused)]
    if fused:
        kernels += (*_writers(graph, mesh, device, work), *_readers(graph, mesh, device, plain))
    for kernel, count in Counter(kernels).items():
        ns = _kernel_ns(graph, mesh, device, table[kernel.key], kernel)
        launched = np.where(ns > 0, to_ns(device.host_launch_s) if kernel.starts else 0, 0)
        costs[kernel.key][:] += graph.microbatches * count * (ns + launched)
        hidden = windows.hiding.computed(ns), windows.hiding.launched(launched)
        windows.add_node(kernel.place, number[kernel.key], *hidden, count=count)


def _casts(
    rounding: Rounding, mesh: Mesh, device: Device, all_groups: Sequence[Group], *, fused: bool
) -> Iterator[_Kernel]:
    """Kernels that round a saved tensor after its last use in forward, and that convert it back
    before its first use in backward. They read or write the tensor before rounding too, unless a
    kernel that they are fused into has it."""
    graph, known = rounding.graph, blocks_of(rounding.graph, mesh)
    forward = {g.root: g for g in all_groups if g.phase is Phase.FORWARD}
    for group in all_groups:
        copy = graph.nodes[group.root.node]
        if not is_optional(copy) or not rounding.rounds(group.root):
            continue
        original = _original(graph, copy)
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
            touched = rounding.saved_type(group.root), *[graph.type_of(group.root)] * has_wide
            where = copy.key, group.root.output, known.window_of(node)
            yield _Kernel(*where, touched, device.kernels.pointwise, starts)


def _writers(
    graph: Graph, mesh: Mesh, device: Device, work: Mapping[int, Traffic]
) -> Iterator[_Kernel]:
    """Writes of originals that only their own kernel reads, for each of their copies."""
    known = blocks_of(graph, mesh)
    for copy in filter(_is_fused_copy, graph.nodes):
        original = _original(graph, copy)
        writes, part = work[original.index].writes, bandwidth_part(original, device)
        for output, written in enumerate(writes):
            if not written:
                where, tensor = (copy.key, output, known.window_of(original)), copy.outputs[output]
                yield _Kernel(*where, (tensor,), part, starts=not any(writes))


def _readers(
    graph: Graph, mesh: Mesh, device: Device, all_groups: Sequence[Group]
) -> Iterator[_Kernel]:
    """Reads by ops of backward that are no copies, and fused with a copy that they read."""
    known = blocks_of(graph, mesh)
    for group in all_groups:
        copy = graph.nodes[group.root.node]
        if _is_fused_copy(copy):
            for use in dict.fromkeys((use.node, use.arg) for use in group.uses):
                reader = graph.nodes[use[0]]
                if is_fusible(reader) and not is_optional(reader):
                    where = copy.key, group.root.output, known.window_of(reader)
                    tensor, part = graph.type_of(group.root), bandwidth_part(reader, device)
                    yield _Kernel(*where, (tensor,), part)


def _is_fused_copy(node: Node) -> bool:
    return is_optional(node) and is_fusible(node) and not node.view


def _kernel_ns(
    graph: Graph, mesh: Mesh, device: Device, entry: NodeClass, kernel: _Kernel
) -> IntArray:
    """Nanoseconds of a kernel per choice of the copy; 0 where its output is not saved."""

    def ns(state: Sharding) -> int:
        moved = sum(local_bytes(t, graph.atoms, state, mesh.sizes) for t in kernel.tensors)
        return to_ns(pointwise_s(moved, device, kernel.part, starts=kernel.starts))

    states = (c.states if isinstance(c, Saved) else () for c in entry.choices)
    return np.array([ns(some[kernel.output]) if some else 0 for some in states], np.int64)
