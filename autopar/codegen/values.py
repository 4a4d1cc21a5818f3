"""The local values of a program while it is written: every root in every state it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.codegen.chunks import emit_chunks
from autopar.codegen.collectives import Emitter, parts_of, sending
from autopar.codegen.routes import Tree, collective_of, path, tree
from autopar.errors import PlanMismatchError
from autopar.ir.buckets import can_share, is_bucketed
from autopar.ir.graph import Phase, Ref, Role
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.layout import Layout, Move
from autopar.runtime.program.lean import LeanGraph

aten = torch.ops.aten


class LocalGraph:
    """One of the two graphs while it is written, with its inputs and outputs by name. `values` has
    the local value of each root in each state reached, `views` that of each view in each sharding
    asked for."""

    def __init__(self) -> None:
        self.graph = LeanGraph()
        self.inputs: dict[str, fx.Node] = {}
        self.outputs: dict[str, fx.Node] = {}
        self.values: dict[tuple[Ref, Sharding], fx.Node] = {}
        self.views: dict[tuple[int, Sharding], fx.Node] = {}

    def placeholder(self, name: str) -> fx.Node:
        """A further input, behind the others and before everything else."""
        identifier = f"{''.join(c if c.isalnum() else '_' for c in name)}__{len(self.inputs)}"
        last = next(reversed(self.inputs.values()), None)
        place = self.graph.inserting_before() if last is None else self.graph.inserting_after(last)
        with place:
            self.inputs[name] = self.graph.placeholder(identifier)
        return self.inputs[name]


class Values:
    """Brings roots into states, once per phase each, by the steps of the plan's routes."""

    def __init__(self, layout: Layout, groups: Sequence[Group]) -> None:
        self.layout = layout
        self.axes = layout.mesh
        self.sizes = layout.mesh.sizes
        self.local = {phase: LocalGraph() for phase in Phase}
        self.groups = {(group.root, group.phase): group for group in groups}
        self._trees: dict[str, Tree] = {}
        self._saved: set[str] = set()

    def made_in(self, ref: Ref) -> Sharding:
        """The state in which a root comes into being."""
        node = self.layout.graph.nodes[ref.node]
        if node.role is Role.PARAM:
            return self.layout.params[node.target].storage
        return self.layout.pair(node)[1][ref.output]

    def define(self, phase: Phase, ref: Ref, value: fx.Node) -> None:
        """`value` is root `ref` as it comes into being."""
        self.local[phase].values[ref, self.made_in(ref)] = value

    def path(self, group: Group, state: Sharding) -> tuple[Move, ...]:
        """The steps that bring the group's root into `state`; PlanMismatchError if the plan has
        none."""
        source = self.layout.source(group)
        if group.key not in self._trees:
            self._trees[group.key] = tree(source, self.layout.routes.get(group.key, ()))
        try:
            return path(self._trees[group.key], source, state)
        except KeyError:
            root = self.layout.graph.nodes[group.root.node]
            raise PlanMismatchError(
                f"{group.key} ({root.op}): the plan's route never leads from {source} to {state}, "
                "which a use asks for; plan again"
            ) from None

    def value(self, group: Group, state: Sharding) -> fx.Node:
        """The group's root in `state`."""
        values = self.local[group.phase].values
        if (group.root, state) in values:
            return values[group.root, state]
        found = self._source(group)
        for move in self.path(group, state):
            if (group.root, move.target) not in values:
                values[group.root, move.target] = self._moved(group, move, found)
            found = values[group.root, move.target]
        return found

    def _source(self, group: Group) -> fx.Node:
        local, root = self.local[group.phase], self.layout.graph.nodes[group.root.node]
        key = group.root, self.layout.source(group)
        if key not in local.values:
            if root.role is Role.CONSTANT:
                local.values[key] = local.graph.get_attr(root.target)
            elif group.phase is Phase.BACKWARD and self._is_made(group.root):
                local.values[key] = self._save(group)
            else:
                raise PlanMismatchError(f"{group.key}: {root.name} is used before it is made")
        return local.values[key]

    def _is_made(self, ref: Ref) -> bool:
        """Whether the root has come into being in the forward graph."""
        return (ref, self.made_in(ref)) in self.local[Phase.FORWARD].values

    def _save(self, group: Group) -> fx.Node:
        """The root in the backward graph, handed over by the forward one."""
        forward, state = self.local[Phase.FORWARD], self.layout.source(group)
        value = forward.values.get((group.root, state))
        if value is None:
            gathered = self.groups.get((group.root, Phase.FORWARD))
            if gathered is None:
                raise PlanMismatchError(
                    f"{group.key}: kept in {state}, but the forward phase does not use it"
                )
            value = self.value(gathered, state)
        name = f"saved:{len(self._saved)}"
        self._saved.add(name)
        forward.outputs[name] = value
        return self.local[Phase.BACKWARD].placeholder(name)

    def _moved(self, group: Group, move: Move, value: fx.Node) -> fx.Node:
        graph = self.layout.graph
        tensor = graph.type_of(group.root)
        collective = collective_of(move, tensor, graph.atoms, self.sizes, group.key)
        local = self.local[group.phase].graph
        with sending(local, self._spoken(group)):
            if collective.chunks:
                result = emit_chunks(local, value, tensor, graph.atoms, self.axes, move, collective)
            else:
                before, after = (parts_of(tensor, graph.atoms, s, self.sizes) for s in move)
                axis = self.axes[collective.axis]
                leaves = None
                if is_bucketed(graph, group) and can_share(collective, move.source):
                    leaves = graph.nodes[group.root.node].role is not Role.PARAM
                emitter = Emitter(local, axis.name, axis.size, before, after, tensor.dtype, leaves)
                result = emitter.emit(value, collective)
        if collective.kind != "slice":
            return result
        if graph.nodes[group.root.node].role is not Role.OP:
            return local.call_function(aten.contiguous.default, (result,))
        # A view would keep the whole tensor in memory.
        return local.call_function(
            aten.clone.default, (result,), {"memory_format": torch.contiguous_format}
        )

    def _spoken(self, group: Group) -> str:
        """The group's root in words."""
        nodes = self.layout.graph.nodes
        root = nodes[group.root.node]
        if root.role is not Role.OP:
            return f"{root.role.value} {root.target}"
        grads = [nodes[use.node].target for use in group.uses if nodes[use.node].role is Role.GRAD]
        if grads:
            return f"the gradient of {grads[0]}"
        return f"what {root.name} made" + (f" in {root.module}" if root.module else "")
