"""What runs a local graph: `eager` as it stands, `inductor` fused and compiled.

If the requested backend fails, that is an error; no other replaces it silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.plans.requests.options import check_backend, default_backend
from autopar.runtime.ops.host_copies import OFFLOAD, RELOAD
from autopar.runtime.ops.operators import function_of
from autopar.runtime.program.function import RunnableGraph
from autopar.runtime.torch_private import inductor

# Ops of an interpreted graph, called as fast as possible.
#
# A call through `torch.ops` unpacks its arguments one by one. Torch's own functions do that 2 to 3
# us faster, and an op of autopar's needs no dispatcher at all. The kernel and its result are the
# same.

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
"""Torch's function for an overload, with the same arguments."""


def call_directly(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`, with ops called by functions of their own."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = DIRECT.get(node.target) or function_of(node.target) or node.target
    gm.recompile()
    return gm


def choose(backend: str | None, device: torch.device) -> str:
    """`backend`, or the default of the device: inductor on CUDA, eager on the CPU. AutoparError if
    there is no such backend."""
    return check_backend(backend) or default_backend(device.type)


def prepare(gm: fx.GraphModule, backend: str) -> RunnableGraph:
    """`gm`, which takes its inputs as a list that it clears, as `backend` runs it."""
    return call_directly(reduce_in_place(gm)) if backend == "eager" else _Inductor(gm)


class _Inductor:
    """Compiles at the first call, for the inputs of that call."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._compiled: RunnableGraph | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._compiled is None:
            try:
                # Inductor would reuse the memory of copies under way to or from the host, which
                # `ops.host_copies` protects from the allocator alone.
                copies = any(node.target in (OFFLOAD, RELOAD) for node in self._gm.graph.nodes)
                self._compiled = inductor(self._gm, inputs, reuses=not copies)
            except Exception as error:
                raise AutoparError(
                    f"backend 'inductor' failed ({type(error).__name__}: {error}): pass "
                    "backend='eager' to autopar.compile to run the graphs as they are"
                ) from error
        return self._compiled(inputs)


c10d = torch.ops._c10d_functional


def reduce_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """All-reduce a buffer in place if nothing else uses it: the functional op would copy it
    first."""
    for node in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        (buffer,) = node.all_input_nodes
        if buffer.target is torch.ops.aten.cat.default and len(buffer.users) == 1:
            node.target = c10d.all_reduce_.default
    gm.recompile()
    return gm
