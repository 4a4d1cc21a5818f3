"""What runs a local graph: `eager` as it stands, `inductor` fused and compiled.

A backend that is asked for and fails is an error; none takes over in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.errors import AutoparError
from autopar.plans.options import check_backend, default_backend
from autopar.runtime.ops.host_copies import OFFLOAD, RELOAD
from autopar.runtime.program.direct_calls import call_directly
from autopar.runtime.program.function import RunnableGraph
from autopar.runtime.torch_private import inductor


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
                # Inductor would write to memory from which tensors are on their way to or from the
                # host, and which `ops.host_copies` only holds from the allocator.
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
    """Reduce a buffer that was filled for nothing else where it is: the op that leaves its input as
    it was copies it first."""
    for node in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        (buffer,) = node.all_input_nodes
        if buffer.target is torch.ops.aten.cat.default and len(buffer.users) == 1:
            node.target = c10d.all_reduce_.default
    gm.recompile()
    return gm
