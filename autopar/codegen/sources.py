"""The calls that a graph's ops are written from, and their arguments on one rank."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.graph import Arg, Graph, Node, Phase, Ref, TensorType
from autopar.ir.own_ops import CHUNKED, DRAW
from autopar.ir.schedule import Value
from autopar.ir.sharding import Sharding
from autopar.rules.op import LocalCall, Shapes
from autopar.rules.table import record_of
from autopar.runtime.ops.draws import drawing, redrawing
from autopar.runtime.program.lean import LeanGraph

Types = tuple[tuple[TensorType, ...], tuple[TensorType, ...]]
"""Of the inputs and outputs of a node."""


def sources(gm: fx.GraphModule, graph: Graph) -> dict[str, fx.Node]:
    """By name, the call that each node of `graph` is written from; passes made `graph` from the
    trace `gm`. Tensors of a call that was not traced are on the meta device."""
    calls = {node.name: node for node in gm.graph.nodes}
    written = fx.Graph()
    for node in graph.nodes:
        if node.op in CHUNKED:
            calls[node.name] = _call(written, graph, node)
    return calls


def whole_types(traced: Graph, graph: Graph) -> Mapping[str, Types]:
    """By name, the types of the tensors of each node of `graph` in the whole step: the traced ones,
    if the node was traced."""
    return {
        node.name: (each.input_types(node), node.outputs)
        for each in (graph, traced)
        for node in each.nodes
    }


def _call(written: fx.Graph, graph: Graph, node: Node) -> fx.Node:
    def value(arg: Arg) -> Any:
        if not isinstance(arg, Ref):
            return arg
        given = written.placeholder("given")
        given.meta["val"] = _empty(graph.type_of(arg))
        return given

    target = getattr(torch.ops.autopar, node.op.split(".")[1]).default
    call = written.call_function(target, tuple(map(value, node.args)))
    call.meta["val"] = tuple(map(_empty, node.outputs))
    return call


def _empty(tensor: TensorType) -> Tensor:
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")


# The arguments of an op on the tensors of one rank: those that depend on shapes follow the local
# ones.
#
# `localize` knows nothing of plans or graphs: shapes of inputs and outputs, whole and local, and
# the op's record are all it reads.

aten = torch.ops.aten


def localize(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(op, args, kwargs) that compute on local tensors what `target(*args, **kwargs)` computes on
    whole ones. Tensors among the arguments are passed through as they are."""
    record = record_of(str(target))
    if record.reshapes:
        return aten.reshape.default, (args[0], list(shapes.local_outputs[0])), {}
    if record.local_args is None:
        return target, tuple(args), dict(kwargs)
    new_args, new_kwargs = list(args), dict(kwargs)
    for (position, keyword), value in record.local_args(LocalCall(args, kwargs, shapes)).items():
        if position < len(new_args):
            new_args[position] = value
        else:
            new_kwargs[keyword] = value
    return target, tuple(new_args), new_kwargs


# Ops that draw random numbers which backward can draw again (`ir.passes.recompute`).
#
# The state is a further output of the draw, so that no node is written for the state itself.


def draws_first(node: Node) -> bool:
    """Whether an op draws for the first time, and returns the state that it draws from."""
    return node.op == DRAW and node.phase is Phase.FORWARD


def read_before(node: Node) -> range:
    """The inputs of an op that exist before it."""
    return range(len(node.inputs) - draws_first(node))


def drawn(node: Node, call: fx.Node, arguments: Sequence[fx.Node]) -> None:
    """Have `call`, of torch's drawing op, return its state, or draw from the state that is the last
    of `arguments`. A node that is no `DRAW` is left alone."""
    if draws_first(node):
        call.target = drawing(call.target)
    elif node.op == DRAW:
        call.target, call.args = redrawing(call.target), (arguments[-1], *call.args)


def positions(node: Node, source: fx.Node) -> Sequence[int] | None:
    """Where the tensors stand in the tuple that a node returns, whose original is `source`; None if
    it returns one tensor. A state does not count; it is the last."""
    value: Any = source.meta["val"]
    if isinstance(value, Tensor):
        return (0,) if draws_first(node) else None
    return [i for i, item in enumerate(value) if isinstance(item, Tensor)]


def state_left(
    graph: LeanGraph, node: Node, results: Sequence[fx.Node], given: Sequence[Sharding]
) -> dict[Value, fx.Node]:
    """The state that a draw returns beside its `results`, if it does, in the sharding `given` for
    it."""
    if not draws_first(node):
        return {}
    state = graph.call(operator.getitem, results[0].args[0], len(results))
    return {Value(Phase.FORWARD, node.inputs[-1], given[-1]): state}
