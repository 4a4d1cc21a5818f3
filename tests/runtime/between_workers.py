"""What `changes_workers` does to parameters between a forward and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

LIMIT = 1e-9

CHANGES: dict[str, Callable[[Any], Any]] = {
    "part": lambda net: net.b.weight[2].zero_(),
    "optimizer": lambda net: torch.optim.AdamW(net.parameters(), 0.1).step(),
    "optimizer of lists": lambda net: torch.optim.SGD(net.parameters(), 0.1, foreach=True).step(),
    # Of several tensors in one op.
    "average": lambda net: get_ema_multi_avg_fn(0.5)(
        list(net.parameters()), [torch.zeros_like(p) for p in net.parameters()], 1
    ),
    "values": lambda net: setattr(net.b.weight, "data", net.b.weight.detach() * 3),
    "load": lambda net: net.load_state_dict({n: 2 * p for n, p in net.state_dict().items()}),
}


def in_between(net: Any, eager: nn.Module) -> dict[str, str]:
    """What gives a compiled model other gradients than if it was not done, and is no error: any of
    `CHANGES`, or of a parameter, by its name."""
    silent: dict[str, str] = {}
    x = torch.randn(4, 8)
    first = copy.deepcopy(eager.state_dict())
    changes: dict[str, Callable[[Any], Any]] = {
        name: lambda net, name=name: net.get_parameter(name).mul_(1.5)
        for name, _ in eager.named_parameters()
    }
    for name, change in (changes | CHANGES).items():
        for each in (net, eager):
            each.load_state_dict(first)
            each.zero_grad()
            each(x).backward()
        ours, theirs = net(x), eager(x)
        theirs.backward()
        with torch.no_grad():
            change(net)
        try:
            ours.backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                silent[name] = str(error)
            continue
        pairs = zip(net.parameters(), eager.parameters(), strict=True)
        off = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)
        if off > LIMIT:
            silent[name] = f"{off}"
    return silent
