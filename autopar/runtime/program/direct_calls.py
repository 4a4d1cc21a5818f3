"""Ops of a graph that runs as it is, called by the shortest way.

An op that is called through `torch.ops` takes its arguments apart in Python's terms, one by one;
torch's own functions do that two to three microseconds sooner, and an op of autopar's needs no
dispatcher at all. What is computed, and by what kernel, is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.ops.operators import function_of

_ATEN = torch.ops.aten

DIRECT: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.add_.Tensor: Tensor.add_,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.cat.default: torch.cat,
    _ATEN.clone.default: torch.clone,
    _ATEN.div.Tensor: torch.div,
    _ATEN.exp.default: torch.exp,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.permute.default: torch.permute,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.relu.default: torch.relu,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.squeeze.dim: torch.squeeze,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
}
"""Torch's function for an overload, which it takes the same arguments to."""


def call_directly(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`, with ops called by functions of their own."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = DIRECT.get(node.target) or function_of(node.target) or node.target
    gm.recompile()
    return gm
