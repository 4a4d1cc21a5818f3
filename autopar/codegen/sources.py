"""What a graph's ops are written from: calls, with arguments for the tensors of one rank."""

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
    """By name, the call that each node of `graph`, made of the one that `gm` is, is written from.
    Tensors of a call that was not traced are on the meta device."""
    calls = {node.name: node for node in gm.graph.nodes}
    written = fx.Graph()
    for node in graph.nodes:
        if node.op in CHUNKED:
            calls[node.name] = _call(written, graph, node)
    return calls


def whole_types(traced: Graph, graph: Graph) -> Mapping[str, Types]:
    """By name, the types that tensors of a node of `graph` have in the whole step: those that were
    traced, where it was."""
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


# The arguments of an op on the tensors of one rank: those that speak of shapes follow the local.
#
# `localize` knows nothing of plans or graphs: shapes of inputs and outputs, whole and local, and
# the op's record are all it reads.

aten = torch.ops.aten


def localize(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(op, args, kwargs) that compute on local tensors what `target(*args, **kwargs)` computes on
    whole ones. Tensors among the arguments are not looked at, and stay where they are."""
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


# What draws random numbers so that backward can draw them once more (`ir.passes.recompute`).
#
# A state is what the draw behind it returns beside all else, so that nothing is written where the
# graph has the state itself.


def draws_first(node: Node) -> bool:
    """Whether an op draws what nobody has drawn, and leaves the state that it draws from."""
    return node.op == DRAW and node.phase is Phase.FORWARD


def read_before(node: Node) -> range:
    """The inputs of an op that are there before it."""
    return range(len(node.inputs) - draws_first(node))


def drawn(node: Node, call: fx.Node, arguments: Sequence[fx.Node]) -> None:
    """Has `call`, of the op of torch that draws, leave the state, or draw from the one that is last
    among the `arguments`; what is no `DRAW` is left alone."""
    if draws_first(node):
        call.target = drawing(call.target)
    elif node.op == DRAW:
        call.target, call.args = redrawing(call.target), (arguments[-1], *call.args)


def positions(node: Node, source: fx.Node) -> Sequence[int] | None:
    """Where the tensors stand in the tuple that a node returns, of which `source` is the original;
    None if it returns one tensor. A state is none of them, and behind all."""
    value: Any = source.meta["val"]
    if isinstance(value, Tensor):
        return (0,) if draws_first(node) else None
    return [i for i, item in enumerate(value) if isinstance(item, Tensor)]


def state_left(
    graph: LeanGraph, node: Node, results: Sequence[fx.Node], given: Sequence[Sharding]
) -> dict[Value, fx.Node]:
    """The state that a draw leaves beside its `results`, if it leaves one, as it is `given` it."""
    if not draws_first(node):
        return {}
    state = graph.call(operator.getitem, results[0].args[0], len(results))
    return {Value(Phase.FORWARD, node.inputs[-1], given[-1]): state}
