"""In which states activations are saved for backward, and what saving costs beside memory."""

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
from autopar.cost_model.rounding import Rounding, where_saved
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.choices import Saved
from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, Group, root_key

_MAX_SAVED = 64
"""Of an op with several outputs, in how many ways they may be saved together."""


def decision_key(node: Node) -> str:
    """What a problem calls the decision on nodes like `node`: of an optional copy, how its original
    is saved."""
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
    """Per class of activations that cross, the states they may be saved in: what their forward
    groups can bring them into, but not partial. None, not to be saved, where only optional copies
    read them. On one device there is one state, of which there is something to decide for those,
    and for the classes `offloaded`, which may be offloaded."""
    ends: dict[str, set[Sharding]] = {}
    roots: dict[str, Group] = {}
    certain = _read_for_certain(graph, all_groups)
    for group in reversed({group.key: group for group in reversed(all_groups)}.values()):
        root, key = graph.nodes[group.root.node], root_key(graph, group.root)
        is_open = group.crosses and group.phase is Phase.FORWARD and root.role is Role.OP
        if is_open and (mesh.axes or key in offloaded or key not in certain):
            source = {s for s in source_states(table[root.key], group) if s is not None}
            asked = (
                s for _, wanted in consumer_states(graph, group, table, owners) for s in wanted
            )
            ends.setdefault(key, source).update(s for s in asked if s is not None)
            roots.setdefault(key, group)
    saves: dict[str, tuple[Sharding | None, ...]] = {}
    for key, found in ends.items():
        tensor = graph.type_of(roots[key].root)
        states = closure(tensor, graph.atoms, sorted(found), mesh.sizes)
        whole = tuple(state for state in states if not state.has_partial)
        none = () if key in certain else (None,)
        saves[key] = (*limits.saved_states(key, tensor, whole), *none)
    return saves


def _read_for_certain(graph: Graph, all_groups: Sequence[Group]) -> frozenset[str]:
    """The classes of tensors that ops of backward read which are no optional copies."""
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
    """`table`, in which optional copies may also be none: what their originals make is saved, in
    any state that the original leaves it in or a reader of backward asks for, or on the way
    between, or nothing reads it. What ops with keys `offloaded` make may be offloaded."""
    found = dict(table)
    alike = {group.key: group for group in reversed(all_groups)}
    ends: dict[tuple[str, int], set[Sharding]] = {}
    for group in alike.values():
        maker = graph.nodes[group.root.node]
        if is_optional(maker):
            states = ends.setdefault((maker.key, group.root.output), set())
            asked = consumer_states(graph, group, table, owners)
            states.update(s for _, wanted in asked for s in wanted if s is not None)
    for key, entry in table.items():
        if not is_optional(entry.node):
            continue
        original = table[original_key(key)]
        per_output: list[tuple[Sharding, ...]] = []
        for output in range(len(entry.node.outputs)):
            made = {s for s in original.output_states(output) if s is not None}
            ref = Ref(original.node.index, output)
            states = closure(
                graph.type_of(ref),
                graph.atoms,
                sorted(made | ends.get((key, output), set())),
                mesh.sizes,
            )
            whole = tuple(state for state in states if not state.has_partial)
            per_output.append(limits.saved_states(root_key(graph, ref), graph.type_of(ref), whole))
        kept = [Saved(states) for states in _together(original, per_output)]
        if original.key in offloaded:
            kept += [replace(each, offloaded=True) for each in kept]
        found[key] = _or_saved(entry, kept)
    return found


def _together(
    original: NodeClass, per_output: Sequence[tuple[Sharding, ...]]
) -> Iterator[tuple[Sharding, ...]]:
    """How the outputs of an op may be saved: in every combination, or, where there are many, as the
    op leaves them."""
    if len(per_output) == 1 or prod(map(len, per_output)) <= _MAX_SAVED:
        yield from product(*per_output)
    else:
        whole = (states for states in original.outputs if not any(s.has_partial for s in states))
        yield from dict.fromkeys(whole)


def _or_saved(entry: NodeClass, saved: Sequence[Saved]) -> NodeClass:
    more = (*saved, Saved())
    return replace(
        entry,
        choices=(*entry.choices, *more),
        inputs=(*entry.inputs, *((),) * len(more)),
        outputs=(*entry.outputs, *(each.states for each in more)),
    )


# What saving costs beside memory where kernels are fused, in the problem that is open about it.
#
# What an optional copy makes is read by its like in the same kernel, and what its original makes
# may never be written. Where it is saved instead, the kernel that makes it writes it, and those
# that read it in backward do. Readers that are optional copies themselves are not counted: they may
# not be.


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
    """Adds to the `costs` of saving what optional copies would recompute, and to `windows`. What
    is rounded is written and read as it was rounded alone, which is priced there (`rounding`)."""
    graph = rounding.graph
    number = {key: i for i, key in enumerate(table)}
    plain = [group for group in all_groups if not rounding.rounds(group.root)]
    found = Counter((*_writers(graph, mesh, device, work), *_readers(graph, mesh, device, plain)))
    for kernel, count in found.items():
        ns = _kernel_ns(graph, mesh, device, table[kernel.key], kernel)
        launched = np.where(ns > 0, to_ns(device.host_launch_s) if kernel.starts else 0, 0)
        costs[kernel.key][:] += graph.microbatches * count * (ns + launched)
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
