"""What a graph's ops are written from: calls, with arguments for the tensors of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.graph import Arg, Graph, Node, Ref, TensorType
from autopar.ir.own_ops import CHUNKED
from autopar.rules.op import LocalCall, Shapes
from autopar.rules.table import record_of

Types = tuple[tuple[TensorType, ...], tuple[TensorType, ...]]
"""Of the inputs and outputs of a node."""


def sources(gm: fx.GraphModule, graph: Graph) -> dict[str, fx.Node]:
    """By name, the call that each node of `graph`, made of the one that `gm` is, is written from.
    Tensors of a call that was not traced are on the meta device."""
    found = {node.name: node for node in gm.graph.nodes}
    written = fx.Graph()
    for node in graph.nodes:
        if node.op in CHUNKED:
            found[node.name] = _call(written, graph, node)
    return found


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
    made = written.call_function(target, tuple(map(value, node.args)))
    made.meta["val"] = tuple(map(_empty, node.outputs))
    return made


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
