"""Faults in the rewriter: collectives, values, arguments, exchanges, passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.codegen import emit, microbatches, passes
from autopar.codegen.emit import LocalGraph, _Generator
from autopar.codegen.local_graph import Messages
from autopar.codegen.ops import loss, norm, peers
from autopar.codegen.ops.peers import Peers
from autopar.codegen.ops.table import EMITTERS
from autopar.ir.graph import Node, Phase, Role
from autopar.ir.schedule import Message, Value
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group
from autopar.plans.scheduling.routes import Routes
from autopar.rules.table import OPS
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.program import Program
from tests.codegen.test_events import test_events_are_in_order
from tests.codegen.test_passes import test_what_is_sent_and_awaited_stays_where_it_is
from tests.codegen.test_rounding import test_what_float16_does_not_have_gives_no_infinity
from tests.faults.table import by_test, exchanged, fault, verified

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Patch = pytest.MonkeyPatch


@fault(verified("data parallel"))
def mean_never_divided(patch: Patch) -> None:
    patch.setattr(_Generator, "_averaged_over", lambda self, node, output: 1)


@fault(verified("data parallel"))
def mean_divided_twice(patch: Patch) -> None:
    original = _Generator._averaged_over
    patch.setattr(
        _Generator,
        "_averaged_over",
        lambda self, node, output: original(self, node, output) ** 2,
    )


@fault(verified("saved"))
def activation_saved_before_it_is_reduced(patch: Patch) -> None:
    """What is handed to backward is the value as its op left it, whatever it should be kept in."""
    original = _Generator._program

    def program(self: Any, forward: Any, *others: Any) -> Program:
        for number, value in enumerate(self.schedule.saved):
            made = value._replace(state=self.layout.output_state(value.ref))
            if made.state.has_partial and value.state.is_replicated:
                forward.outputs[f"saved:{number}"] = forward.values[made]
        return original(self, forward, *others)

    patch.setattr(_Generator, "_program", program)


@fault(verified("layers"))
def partial_sum_for_the_whole(patch: Patch) -> None:
    """A use that asks for the whole is given what another use asked for, a summand."""
    original = _Generator._value

    def shared(self: Any, local: LocalGraph, value: Value) -> fx.Node:
        for held, found in local.values.items():
            pairs = zip(held.state, value.state)
            alike = all(a == b or (a.kind, b.kind) == ("P", "R") for a, b in pairs)
            if (held.phase, held.ref) == (value.phase, value.ref) and alike:
                return found
        return original(self, local, value)

    patch.setattr(_Generator, "_value", shared)


@fault(verified("layers"), silent=False)
def transposition_forgotten_in_backward(patch: Patch) -> None:
    original = _Generator._view

    def viewed(self: Any, graph: LeanGraph, index: int, value: Any, before: Any, after: Any) -> Any:
        node = self.graph.nodes[index]
        square = len(set(node.outputs[0].shape)) == 1
        if node.op == "aten.t.default" and square and graph is self.local[Phase.BACKWARD].graph:
            return value
        return original(self, graph, index, value, before, after)

    patch.setattr(_Generator, "_view", viewed)


@fault(verified("zero"), silent=False)
def gradient_left_as_the_parameter_is_kept(patch: Patch) -> None:
    original = _Generator._argument

    def argument(self: Any, node: Node, arg: int) -> fx.Node:
        if node.role is not Role.GRAD:
            return original(self, node, arg)
        group, _ = self.use_of[node.index, arg]
        made = Value(group.phase, group.root, self.layout.output_state(group.root))
        return self._value(self.local[group.phase], made)

    patch.setattr(_Generator, "_argument", argument)


@fault(verified("states"))
def buffer_updated_with_a_summand(patch: Patch) -> None:
    """A new value of a buffer leaves the graph before it is reduced."""
    original = _Generator._argument

    def argument(self: Any, node: Node, arg: int) -> fx.Node:
        group, use = self.use_of[node.index, arg]
        made = Value(group.phase, group.root, self.layout.output_state(group.root))
        if node.role is Role.MUTATION and not use.chain and made.state.has_partial:
            return self._value(self.local[group.phase], made)
        return original(self, node, arg)

    patch.setattr(_Generator, "_argument", argument)


@fault(verified("tensor parallel"))
def loss_counted_by_every_rank(patch: Patch) -> None:
    """The tangent of the loss grows with the number of ranks."""
    original = LocalGraph.placeholder

    def placed(self: LocalGraph, name: str) -> fx.Node:
        found = original(self, name)
        if not name.startswith("tangent:"):
            return found
        return self.graph.call_function(aten.mul.Scalar, (found, 2.0))

    patch.setattr(LocalGraph, "placeholder", placed)


@fault(verified("states"), silent=False)
def output_in_another_sharding_than_said(patch: Patch) -> None:
    original = _Generator._program

    def program(self: Any, *written: Any) -> Any:
        found = original(self, *written)
        for position, state in found.detached_shardings.items():
            whole = Sharding.replicated(len(self.sizes))
            other = whole.with_axis(0, Sharding.parse("[S(0)]")[0])
            found.detached_shardings[position] = other if state == whole else whole
        return found

    patch.setattr(_Generator, "_program", program)


@fault(verified("attention"), silent=False)
def bounds_of_a_slice_left_as_traced(patch: Patch) -> None:
    for op in ("aten.slice.Tensor", "aten.split_with_sizes.default", "aten.split.Tensor"):
        patch.setitem(OPS, op, replace(OPS[op], local_args=None))


@fault(verified("vocabulary"))
def one_row_too_many_is_looked_up(patch: Patch) -> None:
    original = Peers.local

    def local(self: Peers, indices: fx.Node, length: int) -> Any:
        at, _ = original(self, indices, length)
        inside = self(
            aten.logical_and.default,
            self(aten.ge.Scalar, at, 0),
            self(aten.le.Scalar, at, length),
        )
        return at, inside

    patch.setattr(Peers, "local", local)


@fault(verified("vocabulary"))
def rows_of_other_ranks_not_masked(patch: Patch) -> None:
    def embedding(p: Peers) -> list[fx.Node]:
        weight, indices = p.args[:2]
        rows = p.shapes.local_inputs[0][0]
        at, _ = p.local(indices, rows)
        return [p(aten.embedding.default, weight, p(aten.clamp.default, at, 0, rows - 1))]

    patch.setitem(EMITTERS, "aten.embedding.default", embedding)


@fault(verified("vocabulary"))
def ignored_targets_counted(patch: Patch) -> None:
    original = loss._own_targets
    patch.setattr(
        loss, "_own_targets", lambda p, target, _, classes: original(p, target, -7, classes)
    )


def not_sent(patch: Patch, left_out: str) -> None:
    """Rows that should be reduced by `left_out` stay those of the rank."""
    original = Peers.reduced

    def kept(self: Peers, rows: fx.Node, how: str) -> fx.Node:
        if how != left_out:
            return original(self, rows, how)
        for _ in peers.exchange_axes(self.node, self.choice):
            self._sent.pop(0)
        return rows

    patch.setattr(Peers, "reduced", kept)


@fault(verified("vocabulary"))
def largest_score_of_the_rank_alone(patch: Patch) -> None:
    not_sent(patch, "max")


@fault(exchanged("aten.native_layer_norm.default", "3"))
def sums_of_the_rank_alone(patch: Patch) -> None:
    not_sent(patch, "sum")


@fault(verified("vocabulary"))
def pieces_of_a_table_nested_the_other_way(patch: Patch) -> None:
    patch.setattr(peers, "nesting", lambda atom, axes: tuple(sorted(axes)))


@fault(exchanged("aten._fused_rms_norm_backward.default", "2"))
def gradient_of_a_norm_without_its_mean(patch: Patch) -> None:
    original = norm._mean

    def halved(p: Peers, x: fx.Node, dims: list[int]) -> fx.Node:
        return p(aten.mul.Scalar, original(p, x, dims), 0.5)

    patch.setattr(norm, "_mean", halved)


@fault(by_test(test_what_is_sent_and_awaited_stays_where_it_is))
def waits_left_out(patch: Patch) -> None:
    def without_waits(graph: fx.Graph) -> fx.Graph:
        for node in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        return graph

    original = passes.fuse_bias
    patch.setattr(passes, "fuse_bias", lambda graph: without_waits(original(graph)))


@fault(by_test(test_events_are_in_order, "zero"))
def message_waited_for_where_it_starts(patch: Patch) -> None:
    """What should hide is exposed: a fault of speed alone."""
    original = Messages.start

    def start(self: Messages, message: Message, given: list[fx.Node]) -> None:
        original(self, message, given)
        wait = self.graph.call_function(c10d.wait_tensor.default, (self._issued[message],))
        self._issued[message] = wait

    patch.setattr(Messages, "start", start)


@fault(verified("states"), silent=False)
def output_of_an_op_taken_for_another(patch: Patch) -> None:
    """Of what an op returns, always the first tensor is taken."""
    original = emit.positions

    def first(node: Node, source: fx.Node) -> Sequence[int] | None:
        found = original(node, source)
        return found if found is None else [0] * len(found)

    patch.setattr(emit, "positions", first)


@fault(verified("attention"))
def route_without_its_reductions(patch: Patch) -> None:
    original = Routes.path

    def shortened(self: Routes, group: Group, state: Sharding) -> Any:
        found = original(self, group, state)
        kept = tuple(a for a in found if not any(p.kind == "P" for p in a.source)) or found[-1:]
        source = self.layout.source(group)
        return (kept[0]._replace(source=source), *kept[1:]) if kept else kept

    patch.setattr(Routes, "path", shortened)


@fault(by_test(test_what_float16_does_not_have_gives_no_infinity))
def what_float16_does_not_have_saved_as_infinity(patch: Patch) -> None:
    def cast(graph: fx.Graph, node: Node, x: fx.Node) -> fx.Node:
        dtype = getattr(torch, node.outputs[0].dtype)
        return graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})

    patch.setattr(microbatches, "_cast", cast)
