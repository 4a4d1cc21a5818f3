"""In which states activations are saved for backward, where they are not made again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from autopar.cost_model.flows import asked_states, source_states
from autopar.cost_model.limits import Limits
from autopar.cost_model.network import closure
from autopar.cost_model.space import NodeClass
from autopar.ir.choices import Saved
from autopar.ir.copies import is_optional, original_key
from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.ir.mesh import Mesh
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
    away: Collection[str] = (),
) -> dict[str, tuple[Sharding | None, ...]]:
    """Per class of activations that cross, the states they may be saved in: what their forward
    groups can bring them into, but not partial. None, not to be saved, where only optional copies
    read them. On one device there is one state, of which there is something to decide for those,
    and for the classes `away`, which may be offloaded."""
    ends: dict[str, set[Sharding]] = {}
    roots: dict[str, Group] = {}
    certain = _read_for_certain(graph, all_groups)
    for group in reversed({group.key: group for group in reversed(all_groups)}.values()):
        root, key = graph.nodes[group.root.node], root_key(graph, group.root)
        is_open = group.crosses and group.phase is Phase.FORWARD and root.role is Role.OP
        if is_open and (mesh.axes or key in away or key not in certain):
            source = {s for s in source_states(table[root.key], group) if s is not None}
            asked = (s for _, wanted in asked_states(graph, group, table, owners) for s in wanted)
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
    away: Collection[str] = (),
) -> dict[str, NodeClass]:
    """`table`, in which optional copies may also be none: what their originals make is saved, in
    any state that the original leaves it in or a reader of backward asks for, or on the way
    between, or nothing reads it. What ops with keys `away` make may be offloaded."""
    found = dict(table)
    alike = {group.key: group for group in reversed(all_groups)}
    ends: dict[tuple[str, int], set[Sharding]] = {}
    for group in alike.values():
        maker = graph.nodes[group.root.node]
        if is_optional(maker):
            states = ends.setdefault((maker.key, group.root.output), set())
            asked = asked_states(graph, group, table, owners)
            states.update(s for _, wanted in asked for s in wanted if s is not None)
    for key, entry in table.items():
        if not is_optional(entry.node):
            continue
        original = table[original_key(key)]
        per_output: list[tuple[Sharding, ...]] = []
        for output in range(len(entry.node.outputs)):
            made = {s for s in original.made(output) if s is not None}
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
        if original.key in away:
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
