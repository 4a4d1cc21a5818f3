"""Models that the fuzzer found wanting, as small as they could be made, and what the plans that
showed it decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    source: str
    mesh: str
    pins: Mapping[str, str]


REGRESSIONS = {
    "dropout of a tensor whose dims are turned in memory": Found(
        """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = param(6, 5)
    def forward(self, x):
        y = F.linear(x, self.weight).reshape(5, 4, 3, 2).transpose(1, 2)
        return (F.dropout(y, 0.5) * y.cumsum(1)).sum()

def inputs():
    return (floats(5, 4, 5),)
""",
        "5",
        {r":forward:mul\.1": "d0"},
    ),
    "batch norm of a width cut down to 1": Found(
        """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = param(6, 5)
    def forward(self, x):
        y = F.linear(x, self.weight).reshape(5, 5, 3, 2).transpose(1, 2)
        return F.batch_norm(y, None, None, None, None, True, 0.1, 0.01).square().mean() + y.sum()

def inputs():
    return (floats(5, 5, 5),)
""",
        "2",
        {r":backward:native_batch_norm_backward\.0": "d1", r":backward:(div|pow|mul)\.[01]": "-"},
    ),
    "group norm of a batch cut down to 1": Found(
        """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = param(4, 4)
    def forward(self, x):
        y = F.linear(x, self.weight).transpose(1, 2).reshape(2, 4, 4, 4)
        return F.group_norm(y, 2).square().mean()

def inputs():
    return (floats(2, 16, 4),)
""",
        "2",
        {r":forward:mm\.0": "-", r":forward:native_group_norm\.0": "n"},
    ),
    "one element of a rank comes out of a bucket": Found(
        """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = param(2)
        self.bias = param(6, 2)
    def forward(self, x):
        return F.group_norm(x, 1, self.weight).square().mean() + self.bias.sum()

def inputs():
    return (floats(7, 2, 2),)
""",
        "2",
        {
            "param:.*": "[S(0)]|[S(0)]",
            r":forward:native_group_norm\.0": "-",
            r":forward:sum\.0": "-",
        },
    ),
    "uneven chunks are summed in a bucket": Found(
        """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = param(1)
        self.weight = param(1, 9, 3)
    def forward(self, x):
        return F.conv1d(x, self.weight, self.bias, padding=1).sum()

def inputs():
    return (floats(9, 9, 5),)
""",
        "2x3",
        {
            "param:weight": "[C(1), R]|[C(1), R]",
            "param:bias": "[R, R]|[R, R]",
            r":backward:convolution_backward\.0": "-,n",
        },
    ),
}
