"""A plan, applied: the joint graph of a model to the local forward and backward graphs of a rank.

Both graphs are the schedule's events, one by one. Views are written where they are used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.codegen.collectives import sending
from autopar.codegen.local_graph import LocalGraph
from autopar.codegen.microbatches import OWN_OPS, OwnOps, inputs_of, sent_name, sum_name
from autopar.codegen.ops.peers import Peers
from autopar.codegen.ops.table import emit
from autopar.codegen.passes import BIAS, adds_bias
from autopar.codegen.sources import (
    drawn,
    localize,
    positions,
    read_before,
    sources,
    state_left,
    whole_types,
)
from autopar.errors import PlanMismatchError
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import OUTPUT_ROLES, STORED_ROLES, Graph, Node, Phase, Ref, Role, TensorType
from autopar.ir.own_ops import SEND, STATE, is_result
from autopar.ir.passes.microbatch_states import is_proportional
from autopar.ir.redistribute import local_shape
from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    Schedule,
    Start,
    Take,
    Transfer,
    Update,
    Value,
    Wait,
)
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunked_dim
from autopar.ir.uses import Group, Use, groups
from autopar.plans.layout import Layout
from autopar.plans.scheduling.events import schedule
from autopar.plans.scheduling.routes import Routes
from autopar.rules.op import Shapes
from autopar.rules.table import record_of
from autopar.rules.work import exchange_axes, exchanges
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.program import Program, Sum

aten = torch.ops.aten


@collection_paused()
def generate(gm: fx.GraphModule, graph: Graph, layout: Layout) -> Program:
    """The local graphs of a stage by its `layout`, for the joint graph `gm`, whose snapshot is
    `graph`.

    PlanMismatchError, naming the tensor, if the plan's decisions do not fit the graph.
    """
    scheduled = schedule(layout)
    last = _Generator(gm, graph, layout, scheduled, is_last=True)
    program = last.run()
    before = scheduled.before
    return replace(
        program,
        before=None
        if before is None
        else _Generator(gm, graph, layout, before, is_last=False).run(),
        microbatches=scheduled.microbatches,
        sums=last.sums(),
        tangent_dtypes={
            f"tangent:{node.target}": node.outputs[0].dtype
            for node in layout.graph.with_role(Role.TANGENT)
        },
        is_proportional=is_proportional(graph),
    )


class _Generator:
    """Writes the graphs of `scheduled`, the last microbatch of a step or one before it. `traced` is
    the snapshot of `gm`, and `layout` has the graph after passes."""

    def __init__(
        self,
        gm: fx.GraphModule,
        traced: Graph,
        layout: Layout,
        scheduled: Schedule,
        *,
        is_last: bool,
    ) -> None:
        self.gm, self.layout, self.schedule, self.is_last = gm, layout, scheduled, is_last
        self.graph = graph = self.layout.graph
        self.types = whole_types(traced, graph)
        self.routes = Routes(self.layout)
        self.mesh, self.sizes = self.layout.mesh, self.layout.mesh.sizes
        self.local = {phase: LocalGraph(self.layout, self._spoken) for phase in Phase}
        """The graphs that are written: of a backward in two parts first one, then the other."""
        self.fx_nodes = sources(gm, graph)
        all_groups = groups(graph)
        self.read = {group.root for group in all_groups}
        self.use_of = {(u.node, u.arg): (group, u) for group in all_groups for u in group.uses}
        self.gradients = {
            self.use_of[node.index, 0][0].root: node.target for node in graph.with_role(Role.GRAD)
        }
        self.own = OwnOps(graph, self.sizes, is_last=is_last)
        self.left: set[Ref] = set()
        """The tensors that were returned as the gradient of a parameter."""
        self.shapes: dict[tuple[str, tuple[Sharding, ...], tuple[Sharding, ...]], Shapes] = {}

    def run(self) -> Program:
        for node in self.graph.nodes:
            if node.role in (Role.OP, Role.CONSTANT) or node.role in OUTPUT_ROLES:
                continue
            local = self.local[node.phase]
            local.values[self._output(node)] = local.placeholder(f"{node.role.value}:{node.target}")
        forward, backward = (self.local[phase] for phase in Phase)
        for local, events in ((forward, self.schedule.forward), (backward, self.schedule.backward)):
            for name in self._further_inputs(events):
                local.placeholder(name)
        for event in self.schedule.forward:
            self._emit(forward, event)
        for number, value in enumerate(self.schedule.saved):
            name = f"saved:{number}"
            forward.outputs[name] = forward.values[value]
            backward.values[value] = backward.placeholder(name)
        for event in self.schedule.backward:
            self._emit(backward, event)
        weights = None if self.graph.second_part is None else self._second_part()
        for node in self.graph.nodes:
            if node.role in OUTPUT_ROLES and self.is_last:
                name = f"{node.role.value}:{node.target}"
                self.local[node.phase].outputs[name] = self._leaving(node)
            elif is_result(node) and not self.is_last:
                local = self.local[node.phase]
                local.outputs[sum_name(node)] = local.values[self._output(node)]
        return self._program(forward, backward, weights)

    def _second_part(self) -> LocalGraph:
        """The second part of backward, which takes what the first carries over as inputs."""
        first = self.local[Phase.BACKWARD]
        second = self.local[Phase.BACKWARD] = LocalGraph(self.layout, self._spoken)
        for node in self.graph.with_role(Role.TANGENT):
            second.values[self._output(node)] = second.placeholder(
                f"{node.role.value}:{node.target}"
            )
        for name in self._further_inputs(self.schedule.weights):
            second.placeholder(name)
        saved = dict.fromkeys((*self.schedule.saved, *self.schedule.carried))
        numbers = {value: number for number, value in enumerate(saved)}
        for value in self.schedule.carried:
            name = f"saved:{numbers[value]}"
            first.outputs[name] = self._value(first, value)
            second.values[value] = second.placeholder(name)
        for event in self.schedule.weights:
            self._emit(second, event)
        return second

    def sums(self) -> tuple[Sum, ...]:
        """The sums that microbatches pass on to the next."""
        return tuple(
            self.own.sum_of(node, self.layout.output_state(Ref(node.index)))
            for node in filter(is_result, self.graph.nodes)
        )

    def _output(self, node: Node) -> Value:
        """The output of a node, in its sharding."""
        state = self.layout.output_state(Ref(node.index))
        return Value(node.phase, Ref(node.index), state, self._is_on_host(node))

    def _is_on_host(self, node: Node) -> bool:
        """Whether a parameter, or the gradient of one, is on the host."""
        is_one = node.role in (Role.PARAM, Role.GRAD)
        return is_one and bool(self.layout.params[node.target].num_on_host)

    def _leaving(self, node: Node) -> fx.Node:
        """The local value that leaves as `node`. Of two gradients that are one tensor the second is
        a copy: scripts change gradients in place."""
        value, root = self._argument(node, 0), self.use_of[node.index, 0][0].root
        if node.role is Role.GRAD and root in self.left:
            return self.local[node.phase].graph.call(aten.clone.default, value)
        self.left.add(root)
        return value

    def _further_inputs(self, events: Sequence[Event]) -> Iterable[str]:
        nodes = (self.graph.nodes[e.node] for e in events if isinstance(e, Compute))
        return dict.fromkeys(name for n in nodes for name in inputs_of(n, is_last=self.is_last))

    def _emit(self, local: LocalGraph, event: Event) -> None:
        """The nodes of one event, behind all others."""
        match event:
            case Compute():
                self._op(local, event)
            case Start(message):
                given = [self._value(local, transfer.source) for transfer in message.transfers]
                local.messages.start(message, given)
            case Wait(message):
                local.messages.wait(message)
            case Take(transfer, None):
                source = self._value(local, transfer.source)
                local.values[transfer.target] = local.messages.cut(transfer, source)
            case Take(transfer):
                local.values[transfer.target] = local.messages.take(transfer)
            case Free() | Update():
                # Python frees what is not read again; the optimizer steps outside the graphs.
                pass

    def _value(self, local: LocalGraph, value: Value) -> fx.Node:
        root = self.graph.nodes[value.ref.node]
        if value not in local.values and root.role is Role.CONSTANT:
            local.values[value] = local.graph.get_attr(root.target)
        return local.values[value]

    def _program(
        self, forward: LocalGraph, backward: LocalGraph, weights: LocalGraph | None
    ) -> Program:
        detached = {
            int(node.target): self.layout.outputs[node.key]
            for node in self.graph.with_role(Role.DETACHED)
        }
        forward_outputs = tuple(sorted(forward.outputs, key=lambda name: name.startswith("saved:")))
        program = Program(
            forward.module(self.gm, forward_outputs),
            None,
            tuple(forward.inputs),
            forward_outputs,
            detached_shardings=detached,
        )
        if backward.outputs or (weights and weights.outputs):
            program = replace(
                program,
                backward=backward.module(self.gm, tuple(backward.outputs)),
                backward_inputs=tuple(backward.inputs),
                backward_outputs=tuple(backward.outputs),
            )
        if weights and weights.outputs:
            program = replace(
                program,
                weights=weights.module(self.gm, tuple(weights.outputs)),
                weights_inputs=tuple(weights.inputs),
                weights_outputs=tuple(weights.outputs),
            )
        return program

    def _op(self, local: LocalGraph, event: Compute) -> None:
        node, graph = self.graph.nodes[event.node], local.graph
        if node.op == STATE:
            return
        arguments = [self._argument(node, arg) for arg in read_before(node)]
        if node.op in OWN_OPS:
            result = self.own.write(graph, node, arguments, local.inputs, self.layout.pair(node))
            if node.op == SEND:
                local.outputs[sent_name(node)] = result
            local.values |= dict.fromkeys(event.makes, result)
            return
        results = self._results(graph, node, self.fx_nodes[node.name], arguments)
        local.values |= state_left(graph, node, results, self.layout.pair(node)[0])
        for output, value in enumerate(event.makes):
            if value.ref not in self.read:
                continue
            result = results[output]
            num_parts = self._averaged_over(node, output)
            if num_parts > 1:
                result = graph.call(aten.div.Scalar, result, num_parts)
            local.values[value] = result

    def _results(
        self, graph: LeanGraph, node: Node, source: fx.Node, arguments: Sequence[fx.Node]
    ) -> Sequence[fx.Node]:
        """The local outputs of an op."""
        choice, (inputs, outputs) = self.layout.choice(node), self.layout.pair(node)
        if exchange_axes(node, choice):
            given = iter(arguments)
            args, kwargs = map_arg((source.args, source.kwargs), lambda _: next(given))
            shapes = self._shapes(node, inputs, outputs)
            dtype = source.all_input_nodes[0].meta["val"].dtype
            axes, atoms = self.mesh, self.graph.atoms
            sent = exchanges(self.graph, node, choice, self.sizes)
            peers = Peers(graph, node, choice, axes, atoms, shapes, dtype, sent, args, kwargs)
            with sending(graph, f"{node.name} in {node.module}" if node.module else node.name):
                return emit(peers)
        value = self._call(graph, node, source, arguments, inputs, outputs)
        drawn(node, value, arguments)
        places = positions(node, source)
        if places is None:
            return (value,)
        return [graph.call(operator.getitem, value, at) for at in places]

    def _call(
        self,
        graph: LeanGraph,
        node: Node,
        source: fx.Node,
        arguments: Sequence[fx.Node],
        inputs: tuple[Sharding, ...],
        outputs: tuple[Sharding, ...],
    ) -> fx.Node:
        """`node` on local tensors in the shardings `inputs`, which leaves `outputs`."""
        if record_of(node.op).one_layout:
            arguments = [graph.call(aten.contiguous.default, x) for x in arguments]
        shapes = self._shapes(node, inputs, outputs)
        given = iter(arguments)
        args, kwargs = map_arg((source.args, source.kwargs), lambda _: next(given))
        target, args, kwargs = localize(source.target, args, kwargs, shapes)
        call = graph.call_function(target, args, kwargs)
        call.meta[BIAS] = adds_bias(node, shapes, self.graph.input_types(node))
        return call

    def _shapes(
        self, node: Node, inputs: tuple[Sharding, ...], outputs: tuple[Sharding, ...]
    ) -> Shapes:
        """Nodes of one key have equal shapes."""
        known = node.key, inputs, outputs
        if known not in self.shapes:
            whole_inputs, whole_outputs = self.types[node.name]
            self.shapes[known] = Shapes(
                tuple(t.shape for t in whole_inputs),
                tuple(t.shape for t in whole_outputs),
                tuple(map(self._local_shape, self.graph.input_types(node), inputs)),
                tuple(map(self._local_shape, node.outputs, outputs)),
            )
        return self.shapes[known]

    def _local_shape(self, tensor: TensorType, sharding: Sharding) -> tuple[int, ...]:
        """The local shape, with -1 for a dim in chunks, whose size depends on the rank."""
        shape = list(local_shape(tensor, self.graph.atoms, sharding, self.sizes))
        dim = chunked_dim(sharding)
        if dim is not None:
            shape[dim] = -1
        return tuple(shape)

    def _averaged_over(self, node: Node, output: int) -> int:
        """Over how many shards and microbatches an output was averaged, each by itself. Divided by
        their number the means are partial: they sum up to the mean of the whole."""
        if not node.mean:
            return 1
        reduced = {f.name for f in node.factors if f.outputs[output] is None}
        inputs, outputs = self.types[node.name]
        now = self.graph.input_types(node)[0].num_bytes, node.outputs[output].num_bytes
        microbatches = inputs[0].num_bytes // now[0] * now[1] // outputs[output].num_bytes
        return microbatches * self.layout.choice(node).num_parts(reduced, self.sizes)

    def _spoken(self, transfer: Transfer) -> str:
        """The tensor of a transfer, in words."""
        root = self.graph.nodes[transfer.source.ref.node]
        if root.role is not Role.OP:
            return f"{root.role.value} {root.target}"
        grads = self.gradients.get(transfer.source.ref)
        if grads is not None:
            return f"the gradient of {grads}"
        return f"what {root.name} made" + (f" in {root.module}" if root.module else "")

    def _argument(self, node: Node, arg: int) -> fx.Node:
        """The local value of a tensor input, in the sharding that the node's choice asks for."""
        group, use = self.use_of[node.index, arg]
        if node.role in STORED_ROLES:
            target = self.layout.params[node.target].storage
        else:
            target = self.layout.pair(node)[0][arg]
        states = self.layout.seen_through(use, target)
        if states is None:
            raise PlanMismatchError(f"{node.key}: no sharding of {group.key} gives {target}")
        return self._viewed(group, use, states)

    def _viewed(self, group: Group, use: Use, states: Sequence[Sharding]) -> fx.Node:
        """The root in `states[0]`, seen through view k of the use's chain in `states[k + 1]`."""
        local, user = self.local[group.phase], self.graph.nodes[use.node]
        on_host = user.role is Role.GRAD and self._is_on_host(user)
        seen = self.routes.value(group, states[0])
        value = self._value(local, seen._replace(on_host=True) if on_host else seen)
        for k, index in enumerate(use.chain):
            key = index, states[k + 1], on_host
            if key not in local.views:
                local.views[key] = self._view(local.graph, index, value, states[k], states[k + 1])
            value = local.views[key]
        return value

    def _view(
        self, graph: LeanGraph, index: int, value: fx.Node, before: Sharding, after: Sharding
    ) -> fx.Node:
        node = self.graph.nodes[index]
        source = self.fx_nodes[node.name]
        if source.target is operator.getitem:
            if not self.graph.nodes[node.inputs[0].node].view:
                # Each output of an op is a root of its own.
                return value
            return graph.call(operator.getitem, value, source.args[1])
        return self._call(graph, node, source, (value,), (before,), (after,) * len(node.outputs))
