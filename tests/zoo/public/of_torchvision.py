"""torchvision: classification, segmentation, video."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import models

BATCH, SIZE, CLASSES = 4, 64, 8


def _classifier(make: Any, size: int = SIZE, **options: Any) -> Any:
    def build() -> Any:
        return make(num_classes=CLASSES, **options), (torch.randn(BATCH, 3, size, size),)

    return build


def _dense() -> Any:
    model = models.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES)
    return model, (torch.randn(BATCH, 3, SIZE, SIZE),)


def _swin(version: int = 1) -> Any:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    extra: dict[str, Any] = {}
    if version == 2:
        extra = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    model = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, **extra)
    return model, (torch.randn(BATCH, 3, SIZE, SIZE),)


def _vit() -> Any:
    model = models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES)
    return model, (torch.randn(BATCH, 3, 32, 32),)


def _convnext() -> Any:
    from torchvision.models.convnext import CNBlockConfig

    setting = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return models.ConvNeXt(setting, num_classes=CLASSES), (torch.randn(BATCH, 3, SIZE, SIZE),)


def _segmenter(make: Any) -> Any:
    def build() -> Any:
        model = make(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True)
        return model, (torch.randn(BATCH, 3, SIZE, SIZE),)

    return build


def _video() -> Any:
    return models.video.r3d_18(num_classes=CLASSES), (torch.randn(BATCH, 3, 4, 32, 32),)


MODELS = {
    "resnet18": _classifier(models.resnet18),
    "resnext50_32x4d": _classifier(models.resnext50_32x4d),
    "regnet_y_400mf": _classifier(models.regnet_y_400mf),
    "efficientnet_b0": _classifier(models.efficientnet_b0),
    "mobilenet_v2": _classifier(models.mobilenet_v2),
    "mobilenet_v3_small": _classifier(models.mobilenet_v3_small),
    "mnasnet0_5": _classifier(models.mnasnet0_5),
    "shufflenet_v2_x0_5": _classifier(models.shufflenet_v2_x0_5),
    "squeezenet1_1": _classifier(models.squeezenet1_1),
    "alexnet": _classifier(models.alexnet),
    "vgg11_bn": _classifier(models.vgg11_bn, 32),
    "googlenet": _classifier(models.googlenet, init_weights=False),
    "densenet": _dense,
    "swin": _swin,
    "swin_v2": lambda: _swin(2),
    "vit": _vit,
    "convnext": _convnext,
    "fcn_resnet50": _segmenter(models.segmentation.fcn_resnet50),
    "deeplabv3_mobilenet": _segmenter(models.segmentation.deeplabv3_mobilenet_v3_large),
    "lraspp_mobilenet": lambda: (
        models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=CLASSES
        ),
        (torch.randn(BATCH, 3, SIZE, SIZE),),
    ),
    "r3d_18": _video,
}
