"""From a graph, a cluster and a mesh to the `Problem` whose solution is the plan.

    node costs     compute time of the choice, times the nodes of the class        (`kernel_cost`);
                   of a parameter's, its share of the optimizer's step             (`optimizer`)
    flows          one per class of groups: redistributions of its tensor          (`moves`)
    usages         parameters, gradients, optimizer states, kept copies; activations saved for
                   backward, in the sharding their op leaves them in               (`optimizer`)

A parameter's forward flow starts from its storage and has the kept state as one more sink; its
backward flow starts from the kept state; its gradient's flow ends in its storage. An activation
that crosses likewise has a node of its own for the state it is saved in, which is a sink forward
and the source backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.imposed import impose
from autopar.cost_model.kernel_cost import Traffic, node_s, traffic
from autopar.cost_model.limits import Limits
from autopar.cost_model.moves import sent, to_ns
from autopar.cost_model.network import Network, WantedMove, closure, networks
from autopar.cost_model.optimizer import find_optimizer, update_s
from autopar.cost_model.space import NodeClass, classes
from autopar.cost_model.windows import Hiding, Windows
from autopar.errors import InfeasibleError
from autopar.ir.blocks import blocks_of, hides_in, waits_in
from autopar.ir.buckets import is_bucketed, sharing
from autopar.ir.choices import Choice
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import STORED_ROLES, Graph, Phase, Role
from autopar.ir.mesh import Cluster, Device, Mesh
from autopar.ir.problem import Flow, IntArray, Problem, Sink
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, Group, groups, is_saved, requirement, root_key
from autopar.plans.options import Options
from autopar.plans.request import PlanRequest


@collection_paused()
def price(request: PlanRequest) -> Problem:
    """The problem of finding the plan that is wanted. Costs in nanoseconds per step, usages in
    bytes per device, which may add up to the memory limit. InfeasibleError if an op has no choice
    at all."""
    graph, cluster, mesh, options = request.graph, request.cluster, request.mesh, request.options
    all_groups = groups(graph)
    table, limits = limited_classes(request, all_groups)
    owners = {node.target: node.key for node in graph.with_role(Role.PARAM)}
    saves = _saves(graph, mesh, all_groups, table, owners, limits)
    keys = (*table, *(SAVED + key for key in saves))
    number = {key: i for i, key in enumerate(keys)}
    space = _Space(graph, table, saves, number, limits, owners)
    windows = Windows(Hiding.of(mesh), mesh.names)
    costs = _compute(graph, cluster, mesh, options, all_groups, table, windows)
    flows = _flows(space, cluster, mesh, all_groups, windows)
    return Problem(
        name=f"{graph.name} on {mesh}",
        keys=keys,
        labels=(
            *(entry.choices for entry in table.values()),
            *saves.values(),
        ),
        costs=(
            *costs,
            *(np.zeros(len(states), np.int64) for states in saves.values()),
        ),
        usages=_usages(graph, mesh, options, all_groups, table, saves),
        intervals=((0, 1),) * len(keys),
        flows=flows,
        usage_limit=request.memory_limit_bytes,
        windows=windows.stated(),
    )


def limited_classes(
    request: PlanRequest, all_groups: Sequence[Group]
) -> tuple[dict[str, NodeClass], Limits]:
    """The classes with the choices that what is imposed leaves them, and the limits it sets to all
    else. InfeasibleError if a class has none."""
    graph, mesh = request.graph, request.mesh
    limits = impose(graph, mesh, all_groups, request.imposed)
    table = classes(graph, mesh, all_groups, limits)
    for entry in table.values():
        if not entry.choices:
            if entry.node.role is Role.PARAM:
                raise InfeasibleError(
                    f"the gradient of {entry.node.target} cannot be brought into the storage that "
                    "is given for it"
                )
            raise InfeasibleError(
                f"{entry.node.op} in {entry.node.module or graph.name} can be computed on no "
                f"sharding of mesh {mesh}"
            )
    return table, limits


def _saves(
    graph: Graph,
    mesh: Mesh,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    owners: Mapping[str, str],
    limits: Limits,
) -> dict[str, tuple[Sharding, ...]]:
    """Per class of activations that cross, the states they may be saved in: what their forward
    groups can bring them into, but not partial."""
    ends: dict[str, set[Sharding]] = {}
    roots: dict[str, Group] = {}
    alike = {group.key: group for group in reversed(all_groups)}
    for group in reversed(alike.values()) if mesh.axes else ():
        root = graph.nodes[group.root.node]
        if group.crosses and group.phase is Phase.FORWARD and root.role is Role.OP:
            key = root_key(graph, group.root)
            source = _source_states(table[root.key], group)
            asked = (s for _, wanted in _asked_states(graph, group, table, owners) for s in wanted)
            ends.setdefault(key, set(source)).update(s for s in asked if s is not None)
            roots.setdefault(key, group)
    saves: dict[str, tuple[Sharding, ...]] = {}
    for key, found in ends.items():
        tensor = graph.type_of(roots[key].root)
        states = closure(tensor, graph.atoms, sorted(found), mesh.sizes)
        whole = tuple(state for state in states if not state.has_partial)
        saves[key] = limits.saved_states(key, tensor, whole)
    return saves


def _compute(
    graph: Graph,
    cluster: Cluster,
    mesh: Mesh,
    options: Options,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    windows: Windows,
) -> tuple[IntArray, ...]:
    """Compute time of every choice of every class, and of what its op sends, summed over the nodes
    of the class; the optimizer's time of parameters that are trained."""
    work, known = (
        traffic(graph, all_groups, fused=options.fuses(cluster.device)),
        blocks_of(graph, mesh),
    )
    kinds = Counter(
        (graph.nodes[index].key, done, known.window_of(graph.nodes[index]))
        for index, done in work.items()
    )
    costs = {key: np.zeros(len(entry.choices), np.int64) for key, entry in table.items()}
    number = {key: i for i, key in enumerate(table)}
    done_of: dict[tuple[str, Traffic], tuple[IntArray, IntArray]] = {}
    for (key, done, place), count in kinds.items():
        entry = table[key]
        if (key, done) not in done_of:
            done_of[key, done] = _node_ns(graph, cluster.device, mesh, entry, done)
        computed, talk = done_of[key, done]
        costs[key] += count * (computed + talk.sum(axis=0))
        if place is not None:
            hiding = windows.hiding
            windows.add_node(place, number[key], [count * s for s in hiding.computed(computed)])
            for axis in np.flatnonzero(talk.any(axis=1)).tolist():
                waited = hiding.waited(axis, talk[axis])
                windows.add_node(place, number[key], [count * saved for saved in waited])
    trained = {node.target for node in graph.with_role(Role.GRAD)}
    kinds = Counter(node.key for node in graph.with_role(Role.PARAM) if node.target in trained)
    optimizer = find_optimizer(options.optimizer)
    for key, count in kinds.items():
        tensor = table[key].node.outputs[0]
        for c, (storage, _) in enumerate(table[key].outputs):
            seconds = update_s(optimizer, tensor, graph.atoms, storage, mesh, cluster.device)
            costs[key][c] += count * to_ns(seconds)
    return tuple(costs.values())


def _node_ns(
    graph: Graph, device: Device, mesh: Mesh, entry: NodeClass, done: Traffic
) -> tuple[IntArray, IntArray]:
    """Nanoseconds of a node of a class, per choice; by which it takes longer for what it sends, per
    mesh axis and choice."""
    computed = np.zeros(len(entry.choices), np.int64)
    talk = np.zeros((len(mesh.axes), len(entry.choices)), np.int64)
    for c, choice in enumerate(entry.choices):
        assert isinstance(choice, Choice), f"{entry.key} is no op"
        pair = (entry.inputs[c], entry.outputs[c])
        computed[c] = to_ns(node_s(graph, entry.node, done, choice, pair, mesh.sizes, device))
        for each, longer in sent(graph, entry.node, choice, mesh, int(computed[c])):
            talk[each.axis, c] += longer
    return computed, talk


def _usages(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    saves: Mapping[str, tuple[Sharding, ...]],
) -> tuple[IntArray, ...]:
    """Bytes per device of every choice: what is there when the forward phase ends."""
    usages = {key: np.zeros(len(entry.choices), np.int64) for key, entry in table.items()}
    usages |= {SAVED + key: np.zeros(len(states), np.int64) for key, states in saves.items()}
    copies = 2 + find_optimizer(options.optimizer).states
    for key, entry in table.items():
        if entry.node.role is Role.PARAM:
            tensor = entry.node.outputs[0]
            for c, (storage, kept) in enumerate(entry.outputs):
                held = copies * local_bytes(tensor, graph.atoms, storage, mesh.sizes)
                if kept != storage:
                    held += local_bytes(tensor, graph.atoms, kept, mesh.sizes)
                usages[key][c] = entry.count * held
    crossing = [group.root for group in all_groups if is_saved(graph, group)]
    counts = Counter(root_key(graph, root) for root in crossing)
    for key, root in {root_key(graph, root): root for root in crossing}.items():
        entry = table[graph.nodes[root.node].key]
        held = entry.key
        states = tuple(outputs[root.output] for outputs in entry.outputs)
        if key in saves:
            held, states = SAVED + key, saves[key]
        for c, state in enumerate(states):
            each = local_bytes(graph.type_of(root), graph.atoms, state, mesh.sizes)
            usages[held][c] += counts[key] * each
    return tuple(usages.values())


@dataclass(frozen=True, slots=True)
class _Space:
    """What flows are stated in: the classes, the states of saved activations, the numbers of both
    as nodes of the problem, and the keys of parameters by name."""

    graph: Graph
    table: Mapping[str, NodeClass]
    saves: Mapping[str, tuple[Sharding, ...]]
    number: Mapping[str, int]
    limits: Limits
    owners: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Way:
    """Where a group's tensor starts and goes: the key of its maker and the state per choice of
    that; of every sink the key and the state it asks for per choice."""

    group: Group
    maker: str
    source: tuple[Sharding, ...]
    asked: tuple[tuple[str, tuple[Sharding | None, ...]], ...]

    @property
    def ends(self) -> frozenset[Sharding]:
        asked = (s for _, states in self.asked for s in states if s is not None)
        return frozenset((*self.source, *asked))


def _flows(
    space: _Space, cluster: Cluster, mesh: Mesh, all_groups: Sequence[Group], windows: Windows
) -> tuple[Flow, ...]:
    graph, counts = space.graph, Counter(group.key for group in all_groups)
    hidden = Counter((group.key, hides_in(graph, mesh, group)) for group in all_groups)
    waited = Counter(
        (group.key, waits_in(graph, mesh, group))
        for group in all_groups
        if not is_bucketed(graph, group)
    )
    first: dict[str, Group] = {}
    for group in all_groups:
        first.setdefault(group.key, group)
    ways = [_way(space, group) for group in first.values()]
    wanted = [
        WantedMove(graph.type_of(way.group.root), way.ends, is_bucketed(graph, way.group))
        for way in ways
    ]
    made = networks(wanted, graph.atoms, mesh, cluster.device, sharing(graph))
    number = {way.group.key: f for f, way in enumerate(ways)}
    for found, saved in ((hidden, windows.hiding.sent), (waited, windows.hiding.waited)):
        for (key, place), count in found.items():
            if place is not None:
                network = made[number[key]]
                windows.add_flow(place, number[key], network.costs, network.axes, count, saved)
    return tuple(
        _flow(space, way, network, counts[way.group.key])
        for way, network in zip(ways, made, strict=True)
    )


def _way(space: _Space, group: Group) -> _Way:
    graph, key = space.graph, root_key(space.graph, group.root)
    root = space.table[graph.nodes[group.root.node].key]
    asked = _asked_states(graph, group, space.table, space.owners)
    if group.crosses and key in space.saves:
        if group.phase is Phase.BACKWARD:
            return _Way(group, SAVED + key, space.saves[key], asked)
        asked = (*asked, (SAVED + key, space.saves[key]))
    return _Way(group, root.key, _source_states(root, group), asked)


def _flow(space: _Space, way: _Way, network: Network, count: int) -> Flow:
    """The flow of `count` groups alike."""
    place = network.place
    return Flow(
        key=way.group.key,
        source=space.number[way.maker],
        source_state=np.array([place[s] for s in way.source], np.int64),
        sinks=tuple(
            Sink(
                space.number[user],
                np.array([-1 if s is None else place[s] for s in wanted], np.int64),
            )
            for user, wanted in way.asked
        ),
        states=network.names,
        tails=network.tails,
        heads=network.heads,
        costs=space.limits.arc_costs(way.group, network, count * network.costs),
        placements=network.placements,
    )


def _source_states(root: NodeClass, group: Group) -> tuple[Sharding, ...]:
    """The state the group's tensor starts in, per choice of its maker."""
    if root.node.role is Role.PARAM:
        which = 1 if group.phase is Phase.BACKWARD else 0
        return tuple(pair[which] for pair in root.outputs)
    return tuple(outputs[group.root.output] for outputs in root.outputs)


def _asked_states(
    graph: Graph, group: Group, table: Mapping[str, NodeClass], owners: Mapping[str, str]
) -> tuple[tuple[str, tuple[Sharding | None, ...]], ...]:
    """(key of the consumer, state it asks for per choice) of every sink of the group; `owners` are
    the keys of parameters by name."""
    asked: list[tuple[str, tuple[Sharding | None, ...]]] = []
    for use in group.uses:
        user = graph.nodes[use.node]
        if user.role in STORED_ROLES:
            entry = table[owners[user.target]]
            wanted = tuple(pair[0] for pair in entry.outputs)
        else:
            entry = table[user.key]
            wanted = tuple(inputs[use.arg] for inputs in entry.inputs)
        asked.append((entry.key, tuple(requirement(graph, use, s) for s in wanted)))
    root = graph.nodes[group.root.node]
    if root.role is Role.PARAM and group.phase is Phase.FORWARD:
        pairs = table[root.key].outputs
        asked.append((root.key, tuple(None if k == s else k for s, k in pairs)))
    return tuple(asked)
