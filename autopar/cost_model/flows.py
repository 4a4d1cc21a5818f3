"""The redistributions of all tensors, as flows of the problem.

A parameter's forward flow starts from its storage, and its sharding for backward is one more sink.
Its backward flow starts from that sharding, and its gradient's flow ends in its storage. An
activation that is saved for backward likewise has a node of its own for the sharding it is saved
in, which is a sink forward and the source backward. Where the activation may be recomputed, that
node is the one of its optional copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.limits import Limits
from autopar.cost_model.network import MoveRequest, Network, networks
from autopar.cost_model.space import NodeClass
from autopar.cost_model.windows import Windows
from autopar.ir.blocks import hides_in, launched_in, waits_in
from autopar.ir.buckets import is_bucketed, sharing
from autopar.ir.choices import Saved
from autopar.ir.graph import STORED_ROLES, Graph, Phase, Role
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.own_ops import is_optional, option_key
from autopar.ir.passes.microbatches import times
from autopar.ir.problem import Flow, Sink
from autopar.ir.sharding import Sharding
from autopar.ir.uses import SAVED, Group, requirement, root_key


@dataclass(frozen=True, slots=True)
class Space:
    """What flows refer to: the classes of nodes (`table`), the shardings of saved activations
    (`saves`), the `number` of both as nodes of the problem, and the keys of parameters by name
    (`owners`)."""

    graph: Graph
    table: Mapping[str, NodeClass]
    saves: Mapping[str, tuple[Sharding | None, ...]]
    number: Mapping[str, int]
    limits: Limits
    owners: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _FlowPaths:
    """Where a group's tensor starts and ends: the key of its `maker`, and the `source` sharding per
    choice of it, None where no tensor is made; of each consumer the key and, per choice, the
    sharding it needs."""

    group: Group
    maker: str
    source: tuple[Sharding | None, ...]
    consumers: tuple[tuple[str, tuple[Sharding | None, ...]], ...]

    @property
    def ends(self) -> frozenset[Sharding]:
        targets = (s for _, states in self.consumers for s in states if s is not None)
        return frozenset((*(s for s in self.source if s is not None), *targets))


def stated_flows(
    space: Space, cluster: Cluster, mesh: Mesh, all_groups: Sequence[Group], windows: Windows
) -> tuple[Flow, ...]:
    """A flow per class of groups. Adds to `windows` what hides in them."""
    graph, members = space.graph, grouped((group.key, group) for group in all_groups)
    first = {key: alike[0] for key, alike in members.items()}
    hidden = Counter((group.key, hides_in(graph, mesh, group)) for group in all_groups)
    waited = Counter(
        (group.key, waits_in(graph, mesh, group))
        for group in all_groups
        if not is_bucketed(graph, group)
    )
    launched = Counter((group.key, launched_in(graph, mesh, group)) for group in all_groups)
    paths = [_flow_paths(space, group) for group in first.values()]
    requests = [
        MoveRequest(graph.type_of(path.group.root), path.ends, is_bucketed(graph, path.group))
        for path in paths
    ]
    flow_networks = networks(requests, graph.atoms, mesh, cluster.device, sharing(graph))
    number = {path.group.key: f for f, path in enumerate(paths)}
    for counts, saved in ((hidden, windows.hiding.sent), (waited, windows.hiding.waited)):
        for (key, place), count in counts.items():
            if place is not None:
                network, once = (
                    flow_networks[number[key]],
                    times(graph, first[key]) < graph.microbatches,
                )
                rows = windows.of_arcs(network.costs, network.axes, saved)
                windows.add_flow(place, number[key], [count * row for row in rows], once=once)
    for (key, place), count in launched.items():
        hosts, once = (
            count * flow_networks[number[key]].hosts,
            times(graph, first[key]) < graph.microbatches,
        )
        windows.add_flow(place, number[key], windows.hiding.launched(hosts), once=once)
    return tuple(
        _flow(space, path, network, len(members[path.group.key]) * times(graph, path.group))
        for path, network in zip(paths, flow_networks, strict=True)
    )


def _flow_paths(space: Space, group: Group) -> _FlowPaths:
    graph, key = space.graph, root_key(space.graph, group.root)
    root = space.table[graph.nodes[group.root.node].key]
    consumers = consumer_states(graph, group, space.table, space.owners)
    if group.crosses and key in space.saves:
        if group.phase is Phase.BACKWARD:
            return _FlowPaths(group, SAVED + key, space.saves[key], consumers)
        consumers = (*consumers, (SAVED + key, space.saves[key]))
    copy = space.table.get(option_key(root.key))
    if group.phase is Phase.FORWARD and copy is not None and is_optional(copy.node):
        consumers = (*consumers, (copy.key, saved_by(copy, group.root.output)))
    return _FlowPaths(group, root.key, source_states(root, group), consumers)


def _flow(space: Space, paths: _FlowPaths, network: Network, count: int) -> Flow:
    """The flow of `count` equal groups. No arc leaves the state of a tensor that is not made."""
    place, nowhere = network.place, len(network.names)
    is_whole = None not in paths.source
    names, placements = network.names, network.placements
    if not is_whole:
        names = (*names, "nowhere")
        placements = np.vstack([placements, np.full((1, placements.shape[1]), -1, np.int64)])
    return Flow(
        key=paths.group.key,
        source=space.number[paths.maker],
        source_state=np.array([nowhere if s is None else place[s] for s in paths.source], np.int64),
        sinks=tuple(
            Sink(
                space.number[user],
                np.array([-1 if s is None else place[s] for s in targets], np.int64),
            )
            for user, targets in paths.consumers
        ),
        states=names,
        tails=network.tails,
        heads=network.heads,
        costs=space.limits.arc_costs(paths.group, network, count * (network.costs + network.hosts)),
        placements=placements,
    )


def source_states(root: NodeClass, group: Group) -> tuple[Sharding | None, ...]:
    """The group's sharding at its source, per choice of its maker; None where nothing is made."""
    if root.node.role is Role.PARAM:
        which = 1 if group.phase is Phase.BACKWARD else 0
        return tuple(pair[which] for pair in root.outputs)
    return root.output_states(group.root.output)


def consumer_states(
    graph: Graph, group: Group, table: Mapping[str, NodeClass], owners: Mapping[str, str]
) -> tuple[tuple[str, tuple[Sharding | None, ...]], ...]:
    """(key of the consumer, sharding it needs per choice) of every sink of the group; `owners` are
    the keys of parameters by name."""
    consumers: list[tuple[str, tuple[Sharding | None, ...]]] = []
    for use in group.uses:
        user = graph.nodes[use.node]
        if user.role in STORED_ROLES:
            entry = table[owners[user.target]]
            targets = entry.output_states(0)
        else:
            entry = table[user.key]
            targets = entry.input_states(use.arg)
        known = {s: None if s is None else requirement(graph, use, s) for s in set(targets)}
        consumers.append((entry.key, tuple(known[s] for s in targets)))
    root = graph.nodes[group.root.node]
    if root.role is Role.PARAM and group.phase is Phase.FORWARD:
        consumers.append(
            (root.key, tuple(None if k == s else k for s, k in table[root.key].outputs))
        )
    return tuple(consumers)


def saved_by(copy: NodeClass, output: int) -> tuple[Sharding | None, ...]:
    """The sharding an output is saved in, per choice of the optional copy that recomputes it."""
    return tuple(
        choice.states[output] if isinstance(choice, Saved) and choice.states else None
        for choice in copy.choices
    )
