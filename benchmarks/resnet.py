"""A small ResNet of its own: the blocks of He et al., "Deep Residual Learning" (2015)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; `stride` 2 halves height and width."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = _norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = _norm(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images `[batch, 3, height, width]` and labels `[batch]` to the mean cross entropy. Stage k
    has `blocks[k]` blocks of `width * 2^k` channels."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), _norm(width), nn.ReLU())
        channels, stages = width, []
        for k, count in enumerate(blocks):
            layers = []
            for i in range(count):
                layers.append(Block(channels, width << k, 2 if k and not i else 1))
                channels = width << k
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stages(self.stem(images))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)
