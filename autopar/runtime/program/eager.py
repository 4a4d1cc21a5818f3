"""What makes a local graph faster where no compiler does."""

from __future__ import annotations

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

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
