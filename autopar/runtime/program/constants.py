"""What forward found in a list, a dict, a closure or a global, as rank 0 has it: ranks may have
drawn other values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.runtime.process.part_tensors import of_rank_0


def share_constants(gm: fx.GraphModule, device: torch.device) -> None:
    """Give the tensors that `gm` holds the values that rank 0 has, as parameters and buffers have
    them. A collective call; it goes by way of `device`."""
    for name in dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr")):
        value: Any = getattr(gm, name, None)
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            same = of_rank_0(value.detach().to(device)).to(value.device)
            delattr(gm, name)
            gm.register_buffer(name, same)


def share_externals(tensors: Iterable[Tensor], device: torch.device) -> None:
    """The same of the script's tensors that have a gradient, which stay the objects they are; what
    was computed from others is left alone, and compared in each call. A collective call."""
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter) and x.is_leaf and x.layout == torch.strided:
            x.data.copy_(of_rank_0(x.detach().to(device)))
