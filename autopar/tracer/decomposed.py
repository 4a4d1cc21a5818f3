"""Decompositions: of ops whose parts shard better than the whole, and of ops without a rule.

Some ops are split by passes of their own (`split_biased_matmuls` and those behind it). An op of
`DECOMPOSITIONS` becomes the ops of its function there. Any other op without a rule is decomposed by
torch's core decompositions, repeatedly, until every op has a rule or no decomposition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.rules.table import record_of, rule_for
from autopar.tracer import torch_private
from autopar.tracer.fx_graphs import META, replace_node
from autopar.tracer.fx_graphs import call_before as _before
from autopar.tracer.snapshot import call_of

# Batch norm and variances as ops whose sums may be spread over ranks.
#
# The statistics of a batch are sums over all of it, so that they are right however the batch is
# sharded. With given statistics, batch norm in training is batch norm in inference, one fused
# kernel.

aten = torch.ops.aten
_INFERENCE = aten._native_batch_norm_legit_no_training.default
_MASK = [True, True, True]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def _moments(x: Tensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """(variance, mean) of x over `dims`, which stay as dims of size 1. Squares are of distances
    from the mean: the mean of the squares less the square of the mean would cancel."""
    count = prod(x.shape[dim] for dim in dims)
    mean = x.sum([*dims], keepdim=True) / count
    distance = x - mean
    return (distance * distance).sum([*dims], keepdim=True) / max(0, count - correction), mean


def batch_norm_decomposed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit_functional: (y, mean, 1/std, new running mean, new running
    variance). The running variance is that of a sample, with n - 1."""
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        outputs = _INFERENCE(x, weight, bias, running_mean, running_var, momentum, eps)
        return *outputs, running_mean.clone(), running_var.clone()
    y, mean, invstd, var = _normalised(x, weight, bias, running_mean, momentum, eps)
    count = x.numel() // x.shape[1]
    if running_mean is not None and running_var is not None:
        running_mean = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
        sample = var * (count / max(1, count - 1))
        running_var = running_var * (1 - momentum) + sample.to(running_var.dtype) * momentum
    return y, mean, invstd, running_mean, running_var


def batch_norm_without_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit.no_stats: (y, mean, 1/std)."""
    if not training:
        return NotImplemented
    return _normalised(x, weight, bias, None, momentum, eps)[:3]


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, mean, 1/std, variance). Statistics are in the dtype of weights and running statistics,
    if there are any, and computed in float32 at least."""
    like = next((t for t in (weight, state) if t is not None), x)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = _moments(exact, [0, *range(2, x.dim())], 0)
    invstd = torch.rsqrt(var + eps)
    mean, var, invstd = (t.flatten().to(like.dtype) for t in (mean, var, invstd))
    y = _INFERENCE(x, weight, bias, mean, var, momentum, eps)[0]
    return y, mean, invstd, var


def batch_norm_backward_decomposed(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """aten.native_batch_norm_backward: the gradient with fixed statistics, as in inference, plus
    that of the statistics as functions of x: dx -= w / std / n * (db + (x - mean) / std * dw)."""
    if not train or mean is None or invstd is None:
        return NotImplemented
    var = 1 / (invstd * invstd) - eps
    dx, dw, db = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, None, None, False, eps, _MASK
    )
    if mask[0]:
        scale = invstd / -(x.numel() // x.shape[1])
        if weight is not None:
            scale = scale * weight
        slope = _per_channel(scale * invstd * dw.to(scale.dtype), x)
        offset = _per_channel(scale * db.to(scale.dtype), x)
        moved = torch.addcmul(offset, x - _per_channel(mean, x), slope)
        dx = dx + moved.to(dx.dtype)
    return tuple(t if want else None for t, want in zip((dx, dw, db), mask, strict=True))


def _variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    dims = [d % x.dim() for d in dim or range(x.dim())] if x.dim() else []
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    statistics = _moments(exact, dims, 1 if correction is None else correction)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    var, mean = (t.reshape(shape).to(x.dtype) for t in statistics)
    return var, mean


def variance(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.var.correction."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)[0]


def deviation(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.std.correction."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)[0].sqrt()


def variance_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.var_mean.correction: (variance, mean)."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)


NORM_DECOMPOSITIONS: dict[Any, Any] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_decomposed,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_stats,
    aten.native_batch_norm_backward.default: batch_norm_backward_decomposed,
    aten.var.correction: variance,
    aten.std.correction: deviation,
    aten.var_mean.correction: variance_and_mean,
}

Decomposition = Callable[..., Any]
"""An op as a function of its arguments that calls other ops; NotImplemented leaves it as it is."""

DECOMPOSITIONS: dict[Any, Decomposition] = {
    **NORM_DECOMPOSITIONS,
    # A view whose values differ from its memory's cannot be sent.
    aten._conj.default: aten._conj_physical.default,
}


def decompose_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ops of `DECOMPOSITIONS`, and ops without a rule, by their decompositions."""
    pending = [node for node in reversed(gm.graph.nodes) if node.op == "call_function"]
    while pending:
        node = pending.pop()
        if node.target is operator.getitem or not node.users:
            continue
        function = DECOMPOSITIONS.get(node.target)
        if function is None and rule_for(call_of(node)) is None:
            function = torch_private.decomposition(node.target)
        if function is not None:
            pending += reversed(_replace(node, function))
    return gm


def _replace(node: fx.Node, function: Decomposition) -> list[fx.Node]:
    """Put the ops that `function` calls in the place of `node`. Returns these ops, none where the
    function declines, or computes tensors of other shapes."""
    sources = list(dict.fromkeys(node.all_input_nodes))
    several = isinstance(node.meta["val"], tuple | list)
    expected = node.meta["val"] if several else (node.meta["val"],)

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(sources, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        output = function(*map(_own, args), **{k: _own(value) for k, value in kwargs.items()})
        trusted = output is NotImplemented or node.target in DECOMPOSITIONS
        return output if trusted else _cast(output, expected, several=several)

    traced = torch_private.ops_of(call, [source.meta["val"] for source in sources])
    if traced is None:
        return []
    returned = traced.graph.output_node().args[0]
    results = returned if isinstance(returned, tuple | list) else (returned,)
    if not _alike(results, expected):
        return []
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    ops = _copy(node, traced, copies)
    if several:
        for user in list(node.users):
            _, which = user.args
            assert isinstance(which, int)
            replace_node(user, copies[results[which]])
        node.graph.erase_node(node)
    else:
        replace_node(node, copies[results[0]])
    return ops


def _cast(raw: Any, expected: Sequence[Any], *, several: bool) -> Any:
    """The results `raw` in the dtypes of `expected`, those of the op."""
    results = raw if several else (raw,)
    if len(results) != len(expected):
        return raw
    cast = tuple(
        new.to(old.dtype) if isinstance(new, Tensor) and isinstance(old, Tensor) else new
        for new, old in zip(results, expected, strict=True)
    )
    return cast if several else cast[0]


def _own(value: Any) -> Any:
    """A value with lists that a function may change, unlike FX's."""
    return [_own(item) for item in value] if isinstance(value, list | tuple) else value


def _alike(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether the results have the shapes of the op's results, but for those that are None. Dtypes
    are not compared: for statistics under autocast, fake tensors and kernels disagree."""
    if len(results) != len(expected):
        return False
    pairs = [
        (new.meta.get("val") if isinstance(new, fx.Node) else new, old)
        for new, old in zip(results, expected, strict=True)
    ]
    return all(
        isinstance(new, Tensor) and new.shape == old.shape
        for new, old in pairs
        if isinstance(old, Tensor)
    )


def _copy(node: fx.Node, traced: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The ops of `traced` in front of `node`, in its place in the model."""
    ops: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copy = node.graph.node_copy(inner, copies.__getitem__)
            copy.meta = {key: node.meta[key] for key in META if key in node.meta}
            copy.meta["val"] = inner.meta["val"]
            copies[inner] = copy
            ops.append(copy)
    return ops


# Passes that split an op in two where one of the parts shards better than the whole.

_NONE, _MEAN = 0, 1  # at::Reduction


def split_biased_matmuls(gm: fx.GraphModule) -> fx.GraphModule:
    """addmm as mm and add: the matmul may then be summed over ranks before the bias is added,
    once."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if node.kwargs:
            continue
        bias, left, right = node.args
        matmul = _before(node, aten.mm.default, (left, right), node.meta["val"])
        total = _before(node, aten.add.Tensor, (matmul, bias), node.meta["val"])
        replace_node(node, total)
    return gm


def split_dropouts(gm: fx.GraphModule) -> fx.GraphModule:
    """native_dropout as drawing a mask and multiplying by it. The mask depends on no tensor. So
    every rank can draw the whole mask of a single device, and use its part. Numbers are drawn in
    the order of memory, so the drawn tensor has its dims in the memory order of x. Where everything
    is dropped nothing is drawn, as in eager.
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
    """Ops that draw a tensor like another one (`Op.fills`), with an empty tensor for that one. Its
    dims are in the memory order of the result. The numbers then depend on no tensor, and are the
    same on every rank."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not record_of(str(node.target)).fills:
            continue
        x, *others = node.args
        result = node.meta["val"]
        order = sorted(range(result.dim()), key=lambda dim: -result.stride(dim))
        shaped = x.meta["val"].permute(order)
        empty = _before(node, aten.empty.memory_format, (list(shaped.shape),), shaped)
        empty.kwargs = {"dtype": shaped.dtype, "device": shaped.device}
        drawn = _before(node, node.target, (empty, *others), result.permute(order))
        drawn.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        if order != sorted(order):
            back = [order.index(dim) for dim in range(result.dim())]
            drawn = _before(node, aten.permute.default, (drawn, back), result)
        replace_node(node, drawn)
    return gm


def _replace_outputs(node: fx.Node, result: fx.Node, mask: fx.Node) -> None:
    """Put `result` and `mask` in the place of a dropout's outputs."""
    for user in list(node.users):
        replace_node(user, result if user.args[1] == 0 else mask)
    node.graph.erase_node(node)


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
        replace_node(node, result)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mse_loss_backward.default):
        grad, left, right, reduction = node.args
        error = _call(node, aten.sub.Tensor, left, right)
        count = error.meta["val"].numel() if reduction == _MEAN else 1
        scaled = _call(node, aten.mul.Tensor, error, 2 / count)
        replace_node(node, _call(node, aten.mul.Tensor, scaled, grad))
    return gm


def _call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """`_before`, with the value that `target` gives on the fake tensors of its arguments."""
    value = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    return _before(node, target, args, value)
