"""The transfers that bring a tensor into the shardings that its uses need, along the arcs of a
plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import networkx as nx

from autopar.errors import PlanMismatchError
from autopar.ir.buckets import can_share, is_bucketed
from autopar.ir.graph import Phase, TensorType
from autopar.ir.redistribute import Collective, Copies, buffer_bytes, is_legal, layout_copies, step
from autopar.ir.schedule import Transfer, Value
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.layout import Layout, Move


class Arc(NamedTuple):
    """Step `step` of a route. `num_bytes` has the larger side of its collective. `shares` says
    whether that can share a message, which then holds up to `bucket_bytes`. `copies` says which of
    its buffers are laid out anew."""

    step: int
    source: Sharding
    target: Sharding
    collective: Collective
    num_bytes: int
    shares: bool
    bucket_bytes: int
    copies: Copies

    @property
    def reduces(self) -> bool:
        """Whether the tensor is partial on fewer axes behind it."""
        return self.collective.source.kind == "P"


class Routes:
    """The routes of a plan, each computed once for all groups of a key."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.graph = layout.graph
        self._sizes = layout.mesh.sizes
        reloaded_params = (
            each.param for each in layout.streamed_params if each.backward is not None
        )
        self._reloaded = frozenset(
            (*(tensor.root for tensor in layout.offloaded_tensors), *reloaded_params)
        )
        self._parents: dict[str, Mapping[Sharding, Arc]] = {}
        self._paths: dict[tuple[str, Sharding], tuple[Arc, ...]] = {}
        self._transfers: dict[Value, Transfer] = {}

    def source(self, group: Group) -> Value:
        """The value at which the group's routes start: as the tensor is made, or as forward saves
        it."""
        is_reloaded = group.phase is Phase.BACKWARD and group.root in self._reloaded
        phase = group.phase if is_reloaded else self.graph.nodes[group.root.node].phase
        return Value(phase, group.root, self.layout.source(group))

    def value(self, group: Group, state: Sharding) -> Value:
        """The group's tensor in `state`."""
        source = self.source(group)
        return source if source.state == state else Value(group.phase, group.root, state)

    def path(self, group: Group, state: Sharding) -> tuple[Arc, ...]:
        """The shortest path of arcs that brings the group's tensor into `state`. PlanMismatchError
        if the plan has none."""
        key = group.key, state
        if key not in self._paths:
            self._paths[key] = self._find_path(group, state)
        return self._paths[key]

    def transfer(self, group: Group, arc: Arc) -> Transfer:
        """The transfer of the group's tensor along `arc`."""
        target = Value(group.phase, group.root, arc.target)
        transfer = self._transfers.get(target)
        if transfer is None:
            source = self.value(group, arc.source)
            transfer = Transfer(group.key, arc.step, source, target, arc.collective, arc.copies)
            self._transfers[target] = transfer
        return transfer

    def _find_path(self, group: Group, state: Sharding) -> tuple[Arc, ...]:
        source = self.layout.source(group)
        if group.key not in self._parents:
            self._parents[group.key] = self._tree(group, source)
        parents, path, at = self._parents[group.key], list[Arc](), state
        while at != source:
            if at not in parents:
                root = self.graph.nodes[group.root.node]
                raise PlanMismatchError(
                    f"{group.key} ({root.op}): the plan's route never leads from {source} to "
                    f"{state}, which a use asks for; plan again"
                )
            path.append(parents[at])
            at = parents[at].source
        return tuple(reversed(path))

    def _tree(self, group: Group, source: Sharding) -> Mapping[Sharding, Arc]:
        """The last arc on the shortest path from `source` to every state, earlier arcs
        preferred."""
        places = {move: k for k, move in enumerate(self.layout.routes.get(group.key, ()))}
        graph: nx.DiGraph[Sharding] = nx.DiGraph()
        graph.add_node(source)
        graph.add_edges_from(places)
        return {
            head: self._arc(group, places[Move(tail, head)], tail, head)
            for head, tail in nx.bfs_predecessors(graph, source)
        }

    def _arc(self, group: Group, k: int, source: Sharding, target: Sharding) -> Arc:
        tensor, atoms = self.graph.type_of(group.root), self.graph.atoms
        move = self._collective(group.key, tensor, source, target)
        larger = max(buffer_bytes(tensor, atoms, source, target, move, self._sizes))
        shares = is_bucketed(self.graph, group) and can_share(move, source)
        copies = layout_copies(tensor, atoms, source, target, move, self._sizes)
        bucket_bytes = self.layout.mesh[move.axis].bucket_bytes
        return Arc(k, source, target, move, larger, shares, bucket_bytes, copies)

    def _collective(
        self, name: str, tensor: TensorType, source: Sharding, target: Sharding
    ) -> Collective:
        for state in (source, target):
            if not is_legal(tensor, self.graph.atoms, state, self._sizes):
                raise PlanMismatchError(
                    f"{name}: a tensor of shape {list(tensor.shape)} cannot be {state} on this "
                    "mesh; the plan was made for another model"
                )
        collective = step(tensor, self.graph.atoms, source, target)
        if collective is None:
            raise PlanMismatchError(
                f"{name}: {source} -> {target} is not one collective; plan again"
            )
        return collective
