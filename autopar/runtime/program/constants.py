"""Tensors that a graph holds: what forward found in a list, a dict, a closure or a global."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.runtime.process.part_tensors import of_rank_0


def share_constants(gm: fx.GraphModule, device: torch.device) -> None:
    """Give the tensors that `gm` holds the values that rank 0 has, as parameters and buffers have
    them: ranks may have drawn other ones. A collective call; it goes by way of `device`."""
    nodes = gm.graph.find_nodes(op="get_attr")
    for name in dict.fromkeys(str(node.target) for node in nodes):
        value: Any = getattr(gm, name, None)
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            same = of_rank_0(value.detach().to(device)).to(value.device)
            delattr(gm, name)
            gm.register_buffer(name, same)
