"""Models of images: residual, U-shaped, and with depthwise convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SIZE, CLASSES = 8, 8, 6


class _Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut that is projected where shapes change."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(nn.Module):
    """A stem, two stages and a classifier, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(_Residual(8, 8, 1), _Residual(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.layers(self.pool(self.stem(images)))
        logits = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


def images() -> dict[str, Tensor]:
    return {
        "images": torch.randn(BATCH, 3, SIZE, SIZE),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    return ResNet(), images()


class UNet(nn.Module):
    """Two levels down and up, joined by skips; one way up is learned, the other interpolates."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ELU())
        self.bottom = nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect")
        self.up2 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge2 = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.LeakyReLU(0.1))
        self.merge1 = nn.Conv2d(16, 1, 1)

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        low = F.gelu(self.bottom(F.avg_pool2d(second, 2)))
        up = self.merge2(torch.cat([self.up2(low), second], 1))
        wide = F.interpolate(up, scale_factor=2, mode="bilinear", align_corners=False)
        coarse = F.interpolate(low, scale_factor=2.0, mode="nearest").mean(1, keepdim=True)
        scores = self.merge1(torch.cat([wide, first], 1))
        loss = F.binary_cross_entropy_with_logits(scores, mask)
        return loss + F.smooth_l1_loss(F.max_pool2d(mask, 2), coarse), scores.sigmoid()


def unet() -> tuple[nn.Module, dict[str, Tensor]]:
    mask = (torch.rand(BATCH, 1, SIZE, SIZE) < 0.4).float()
    return UNet(), {"images": torch.randn(BATCH, 3, SIZE, SIZE), "mask": mask}


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, dilation, a squeeze-and-excite gate, and a batch norm
    without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm1 = nn.BatchNorm2d(8, track_running_stats=False)
        self.depth = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False)
        self.norm2 = nn.BatchNorm2d(8, momentum=0.3)
        self.grouped = nn.Conv2d(8, 16, 1, groups=4)
        self.gate = nn.Sequential(nn.Conv2d(16, 4, 1), nn.Hardswish(), nn.Conv2d(4, 16, 1))
        self.norm3 = nn.BatchNorm1d(16, affine=False)
        self.act = nn.PReLU(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.hardswish(self.norm1(self.stem(images)))
        x = F.relu6(self.norm2(self.depth(x)))
        x = self.act(self.grouped(x))
        x = x * F.hardsigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return F.cross_entropy(self.head(self.norm3(x.amax((2, 3)))), labels)


def mobile() -> tuple[nn.Module, dict[str, Tensor]]:
    return Mobile(), images()
