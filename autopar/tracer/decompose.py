"""Passes that split an op in two where one of the parts shards better than the whole."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.rules.table import record_of

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # at::Reduction
META = ("custom", "partitioner_tag", "seq_nr", "stack_trace")


def split_biased_matmuls(gm: fx.GraphModule) -> fx.GraphModule:
    """addmm as mm and add: the product may then be summed over ranks before the bias is added,
    once."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if node.kwargs:
            continue
        bias, left, right = node.args
        product = _before(node, aten.mm.default, (left, right), node.meta["val"])
        total = _before(node, aten.add.Tensor, (product, bias), node.meta["val"])
        node.replace_all_uses_with(total)
        gm.graph.erase_node(node)
    return gm


def split_dropouts(gm: fx.GraphModule) -> fx.GraphModule:
    """native_dropout as drawing a mask and multiplying by it. The mask depends on nothing, so that
    every rank can draw all of it, the one that a single device draws, and use its part. Numbers are
    drawn in the order of memory, which is that of a tensor with the dims of x as x has them there.
    Where everything is dropped nothing is drawn, as in eager.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if not train or p == 0:
            continue
        result, mask = node.meta["val"]
        if p == 1:
            kept = _before(node, aten.zeros.default, (list(mask.shape),), mask)
            kept.kwargs = {"dtype": mask.dtype, "device": mask.device}
            _replace_outputs(node, _before(node, aten.mul.Tensor, (x, 0.0), result), kept)
            continue
        order = sorted(range(mask.dim()), key=lambda dim: -mask.stride(dim))
        there = (result.permute(order), mask.permute(order))
        ones = _before(node, aten.ones.default, (list(there[0].shape),), there[0])
        ones.kwargs = {"dtype": result.dtype, "device": result.device}
        drawn = _before(node, aten.native_dropout.default, (ones, p, True), there)
        kept = _before(node, operator.getitem, (drawn, 1), there[1])
        if order != sorted(order):
            back = [order.index(dim) for dim in range(mask.dim())]
            kept = _before(node, aten.permute.default, (kept, back), mask)
        masked = _before(node, aten.mul.Tensor, (x, kept), result)
        scaled = _before(node, aten.mul.Tensor, (masked, 1 / (1 - p)), result)
        _replace_outputs(node, scaled, kept)
    return gm


def draw_from_nothing(gm: fx.GraphModule) -> fx.GraphModule:
    """What is drawn for a tensor like another one (`Op.fills`) as drawn for an empty one, whose
    dims lie in memory as those of the result do: what is drawn then depends on nothing, and is the
    same wherever it is drawn."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not record_of(str(node.target)).fills:
            continue
        x, *others = node.args
        made = node.meta["val"]
        order = sorted(range(made.dim()), key=lambda dim: -made.stride(dim))
        shaped = x.meta["val"].permute(order)
        empty = _before(node, aten.empty.memory_format, (list(shaped.shape),), shaped)
        empty.kwargs = {"dtype": shaped.dtype, "device": shaped.device}
        drawn = _before(node, node.target, (empty, *others), made.permute(order))
        drawn.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        if order != sorted(order):
            back = [order.index(dim) for dim in range(made.dim())]
            drawn = _before(node, aten.permute.default, (drawn, back), made)
        node.replace_all_uses_with(drawn)
        gm.graph.erase_node(node)
    return gm


def _replace_outputs(node: fx.Node, result: fx.Node, mask: fx.Node) -> None:
    """These two in the place of what a dropout returns."""
    for user in list(node.users):
        user.replace_all_uses_with(result if user.args[1] == 0 else mask)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _before(node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A call in front of `node`, in its place in the model."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta.update({key: node.meta[key] for key in META if key in node.meta})
    made.meta["val"] = value
    return made


def split_squared_errors(gm: fx.GraphModule) -> fx.GraphModule:
    """mse_loss and its gradient as arithmetic and a reduction: a mean over part of the elements
    divides by their number, which is not that of all."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.mse_loss.default):
        left, right, reduction = (*node.args, _MEAN)[:3]
        error = _call(node, aten.sub.Tensor, left, right)
        result = _call(node, aten.mul.Tensor, error, error)
        if reduction != _NONE:
            over = aten.mean.default if reduction == _MEAN else aten.sum.default
            result = _call(node, over, result)
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mse_loss_backward.default):
        grad, left, right, reduction = node.args
        error = _call(node, aten.sub.Tensor, left, right)
        count = error.meta["val"].numel() if reduction == _MEAN else 1
        scaled = _call(node, aten.mul.Tensor, error, 2 / count)
        result = _call(node, aten.mul.Tensor, scaled, grad)
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)
    return gm


def _call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """`_before`, with the value that `target` gives on the fake tensors of its arguments."""
    value = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return _before(node, target, args, value)
