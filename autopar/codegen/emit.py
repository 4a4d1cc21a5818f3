"""A plan, applied: the joint graph of a model to the local forward and backward graphs of a rank.

Both graphs are written node by node, in the order of the joint graph. The value of a tensor in a
state is made once per phase, by the steps of its group's route. A tensor of the forward phase that
the backward phase reads is saved in the state its op left it in, a parameter in its `kept` state;
views are taken again wherever they are used.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.codegen.bias import BIAS, adds_bias
from autopar.codegen.collectives import sending
from autopar.codegen.localize import localize
from autopar.codegen.ops.peers import Peers
from autopar.codegen.ops.table import emit
from autopar.codegen.passes import apply_passes
from autopar.codegen.torch_private import unwritten
from autopar.codegen.values import LocalGraph, Values
from autopar.errors import PlanMismatchError
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import OUTPUT_ROLES, STORED_ROLES, Graph, Node, Phase, Ref, Role, TensorType
from autopar.ir.redistribute import local_shape
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunked_dim
from autopar.ir.uses import Group, Use, groups
from autopar.plans.layout import Move, parse_layout
from autopar.plans.plan import Plan
from autopar.rules.intra_op import exchange_axes, exchanges
from autopar.rules.op import Shapes
from autopar.rules.table import record_of
from autopar.runtime.program.program import Program

aten = torch.ops.aten


@collection_paused()
def generate(gm: fx.GraphModule, graph: Graph, plan: Plan) -> Program:
    """The local graphs of `plan` for the joint graph `gm`, of which `graph` is the snapshot.

    PlanMismatchError, naming the tensor, if the plan's decisions do not fit the graph.
    """
    return _Generator(gm, graph, plan).run()


class _Generator:
    def __init__(self, gm: fx.GraphModule, graph: Graph, plan: Plan) -> None:
        self.gm = gm
        self.graph = graph
        self.layout = parse_layout(graph, plan.structure)
        found = groups(graph)
        self.values = Values(self.layout, found)
        self.fx_nodes = [node for node in gm.graph.nodes if node.op != "output"]
        self.use_of = {(use.node, use.arg): (group, use) for group in found for use in group.uses}
        self.made_by: dict[int, list[Group]] = {}
        for group in found:
            if group.phase is graph.nodes[group.root.node].phase:
                self.made_by.setdefault(group.root.node, []).append(group)
        self.read = {group.root for group in found}
        self.shapes: dict[tuple[str, tuple[Sharding, ...], tuple[Sharding, ...]], Shapes] = {}

    def run(self) -> Program:
        for node in self.graph.nodes:
            if node.role in OUTPUT_ROLES:
                local = self.values.local[node.phase]
                local.outputs[f"{node.role.value}:{node.target}"] = self._argument(node, 0)
            elif node.role is Role.OP:
                if not node.view:
                    self._op(node)
            elif node.role is not Role.CONSTANT:
                phase = Phase.BACKWARD if node.role is Role.TANGENT else Phase.FORWARD
                value = self.values.local[phase].placeholder(f"{node.role.value}:{node.target}")
                self.values.define(phase, Ref(node.index), value)
        return self._program()

    def _program(self) -> Program:
        forward, backward = (self.values.local[phase] for phase in Phase)
        detached = {
            int(node.target): self.layout.outputs[node.key]
            for node in self.graph.with_role(Role.DETACHED)
        }
        forward_outputs = sorted(forward.outputs, key=lambda name: name.startswith("saved:"))
        if not backward.outputs:
            return Program(
                self._module(forward, forward_outputs),
                None,
                tuple(forward.inputs),
                tuple(forward_outputs),
                detached_shardings=detached,
            )
        return Program(
            self._module(forward, forward_outputs),
            self._module(backward, tuple(backward.outputs)),
            tuple(forward.inputs),
            tuple(forward_outputs),
            tuple(backward.inputs),
            tuple(backward.outputs),
            detached,
        )

    def _module(self, local: LocalGraph, outputs: Sequence[str]) -> fx.GraphModule:
        local.graph.output(tuple(local.outputs[name] for name in outputs))
        return unwritten(self.gm, apply_passes(local.graph))

    def _op(self, node: Node) -> None:
        source, graph = self.fx_nodes[node.index], self.values.local[node.phase].graph
        arguments = [self._argument(node, arg) for arg in range(len(node.inputs))]
        results = self._results(graph, node, source, arguments)
        for output in range(len(node.outputs)):
            ref = Ref(node.index, output)
            if ref not in self.read:
                continue
            result = results[output]
            ways = self._averaged_over(node, output)
            if ways > 1:
                result = graph.call_function(aten.div.Scalar, (result, ways))
            self.values.define(node.phase, ref, result)
        for group in self.made_by.get(node.index, ()):
            self._send_off(group)

    def _results(
        self, graph: fx.Graph, node: Node, source: fx.Node, arguments: Sequence[fx.Node]
    ) -> Sequence[fx.Node]:
        """The local tensors that an op makes."""
        choice, (inputs, outputs) = self.layout.choice(node), self.layout.pair(node)
        if exchange_axes(node, choice):
            given = iter(arguments)
            args, kwargs = map_arg((source.args, source.kwargs), lambda _: next(given))
            shapes = self._shapes(node, inputs, outputs)
            dtype = source.all_input_nodes[0].meta["val"].dtype
            axes, atoms = self.values.axes, self.graph.atoms
            sent = exchanges(self.graph, node, choice, self.values.sizes)
            peers = Peers(graph, node, choice, axes, atoms, shapes, dtype, sent, args, kwargs)
            with sending(graph, f"{node.name} in {node.module}" if node.module else node.name):
                return emit(peers)
        value = self._call(graph, node, source, arguments, inputs, outputs)
        positions = _tensor_positions(source)
        if positions is None:
            return (value,)
        return [graph.call_function(operator.getitem, (value, at)) for at in positions]

    def _call(
        self,
        graph: fx.Graph,
        node: Node,
        source: fx.Node,
        arguments: Sequence[fx.Node],
        inputs: tuple[Sharding, ...],
        outputs: tuple[Sharding, ...],
    ) -> fx.Node:
        """`node` on local tensors in the shardings `inputs`, which leaves `outputs`."""
        if record_of(node.op).one_layout:
            arguments = [graph.call_function(aten.contiguous.default, (x,)) for x in arguments]
        given = iter(arguments)
        args, kwargs = map_arg((source.args, source.kwargs), lambda _: next(given))
        shapes = self._shapes(node, inputs, outputs)
        target, args, kwargs = localize(source.target, args, kwargs, shapes)
        made = graph.call_function(target, args, kwargs)
        made.meta[BIAS] = adds_bias(node, shapes, self.graph.input_types(node))
        return made

    def _shapes(
        self, node: Node, inputs: tuple[Sharding, ...], outputs: tuple[Sharding, ...]
    ) -> Shapes:
        """Nodes of one key have equal shapes."""
        known = node.key, inputs, outputs
        if known not in self.shapes:
            types = self.graph.input_types(node)
            self.shapes[known] = Shapes(
                tuple(t.shape for t in types),
                tuple(t.shape for t in node.outputs),
                tuple(map(self._local_shape, types, inputs)),
                tuple(map(self._local_shape, node.outputs, outputs)),
            )
        return self.shapes[known]

    def _local_shape(self, tensor: TensorType, sharding: Sharding) -> tuple[int, ...]:
        """As a view is told it: of a dim in chunks, each rank knows its own size."""
        shape = list(local_shape(tensor, self.graph.atoms, sharding, self.values.sizes))
        dim = chunked_dim(sharding)
        if dim is not None:
            shape[dim] = -1
        return tuple(shape)

    def _averaged_over(self, node: Node, output: int) -> int:
        """Over how many pieces an output was averaged one by one. The mean of each is partial once
        it is divided by their number: the mean of the whole is the sum."""
        if not node.mean:
            return 1
        reduced = {f.name for f in node.factors if f.outputs[output] is None}
        return self.layout.choice(node).ways(reduced, self.values.sizes)

    def _send_off(self, group: Group) -> None:
        """Reduce what is partial as soon as it is made: less is left to hold, and the reduction has
        time until the first use. What leaves the graph takes its last form at once."""
        for use, state in zip(group.uses, self.layout.asked(group), strict=True):
            leaves = self.graph.nodes[use.node].role in OUTPUT_ROLES
            for move in self.values.path(group, state):
                if not leaves and not _reduces(move):
                    break
                self.values.value(group, move.target)
        if group.crosses and group.phase is Phase.FORWARD:
            for move in self.values.path(group, self.layout.kept(group.root)):
                if not _reduces(move):
                    break
                self.values.value(group, move.target)

    def _argument(self, node: Node, arg: int) -> fx.Node:
        """The local value of a tensor input, in the sharding that the node's choice asks for."""
        group, use = self.use_of[node.index, arg]
        if node.role in STORED_ROLES:
            wanted = self.layout.params[node.target].storage
        else:
            wanted = self.layout.pair(node)[0][arg]
        states = self.layout.seen_through(use, wanted)
        if states is None:
            raise PlanMismatchError(f"{node.key}: no sharding of {group.key} gives {wanted}")
        return self._viewed(group, use, states)

    def _viewed(self, group: Group, use: Use, states: Sequence[Sharding]) -> fx.Node:
        """The root in `states[0]`, seen through view k of the use's chain in `states[k + 1]`."""
        local = self.values.local[group.phase]
        value = self.values.value(group, states[0])
        for k, index in enumerate(use.chain):
            key = index, states[k + 1]
            if key not in local.views:
                local.views[key] = self._view(local.graph, index, value, states[k], states[k + 1])
            value = local.views[key]
        return value

    def _view(
        self, graph: fx.Graph, index: int, value: fx.Node, before: Sharding, after: Sharding
    ) -> fx.Node:
        node, source = self.graph.nodes[index], self.fx_nodes[index]
        if source.target is operator.getitem:
            if not self.graph.nodes[node.inputs[0].node].view:
                # Each output of an op is a root of its own.
                return value
            return graph.call_function(operator.getitem, (value, source.args[1]))
        return self._call(graph, node, source, (value,), (before,), (after,) * len(node.outputs))


def _tensor_positions(source: fx.Node) -> list[int] | None:
    """Where the tensors stand in the tuple that a node returns; None if it returns one tensor."""
    value: Any = source.meta["val"]
    if isinstance(value, Tensor):
        return None
    return [i for i, item in enumerate(value) if isinstance(item, Tensor)]


def _reduces(move: Move) -> bool:
    return sum(p.kind == "P" for p in move.target) < sum(p.kind == "P" for p in move.source)
