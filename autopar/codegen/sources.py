"""What a graph's ops are written from: the calls that were traced, and those of ops that plans put
in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.graph import Arg, Graph, Node, Ref, TensorType
from autopar.ir.loss_chunks import CHUNKED

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
