"""Lets torchvision be imported beside a CPU build of torch. Import this first.

Its wheels on PyPI hold operators for CUDA, which do not load there; without them, what it registers
when it is imported finds no schemas. No test calls these operators.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
