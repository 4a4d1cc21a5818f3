"""timm: a model of each family, made small by its own options."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import GatedMlp
from timm.models import convmixer, metaformer, mlp_mixer
from timm.models.volo import VOLO
from torch import nn

BATCH, CLASSES = 4, 8


def _model(name: str, size: int = 64, **options: Any) -> Any:
    def build() -> Any:
        model = timm.create_model(name, num_classes=CLASSES, **options)
        return model, (torch.randn(BATCH, 3, size, size),)

    return build


def _family(kind: Any, size: int = 32, **options: Any) -> Any:
    """For families whose named models fix what is to be small."""

    def build() -> Any:
        return kind(num_classes=CLASSES, **options), (torch.randn(BATCH, 3, size, size),)

    return build


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}

MODELS = {
    "resnet18d": _model("resnet18d"),
    "seresnet18": _model("legacy_seresnet18"),
    "efficientnet_lite0": _model("efficientnet_lite0"),
    "mobilenetv3_small_050": _model("mobilenetv3_small_050"),
    "mobilenetv4_conv_small": _model("mobilenetv4_conv_small_035"),
    "ghostnet_050": _model("ghostnet_050"),
    "hardcorenas_a": _model("hardcorenas_a"),
    "vit": _model("vit_tiny_patch16_224", 32, **_VIT),
    "deit3": _model("deit3_small_patch16_224", 32, **_VIT),
    "beit": _model("beit_base_patch16_224", 32, **_VIT),
    "eva02": _model("eva02_tiny_patch14_224", 32, **_VIT),
    "cait": _model("cait_xxs24_224", 32, **_VIT),
    "xcit": _model("xcit_nano_12_p16_224", 32, embed_dim=32, depth=2, num_heads=4),
    "mixer": _family(mlp_mixer.MlpMixer, **_MIXER),
    "gmlp": _family(
        mlp_mixer.MlpMixer,
        block_layer=mlp_mixer.SpatialGatingBlock,
        mlp_layer=GatedMlp,
        mlp_ratio=6,
        **_MIXER,
    ),
    "convmixer": _family(convmixer.ConvMixer, 64, dim=32, depth=2, kernel_size=5),
    "convnext": _model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64)),
    "poolformer": _family(
        metaformer.MetaFormer,
        64,
        depths=(1, 1, 1, 1),
        dims=(8, 16, 32, 64),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=metaformer.GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
    ),
    "maxvit": _model("maxvit_rmlp_pico_rw_256", 64, img_size=64, depths=(1, 1), embed_dim=(32, 64)),
    "coatnet": _model("coatnet_nano_rw_224", 64, img_size=64),
    "levit": _model("levit_128s", 64, img_size=64, embed_dim=(32, 64, 64), depth=(1, 1, 1)),
    "edgenext": _model("edgenext_xx_small"),
    "mobilevit": _model("mobilevit_xxs"),
    "repvgg_a0": _model("repvgg_a0"),
    "nfnet": _model("nf_resnet26"),
    "hrnet": _model("hrnet_w18_small"),
    "dla34": _model("dla34"),
    "res2net": _model("res2net50_26w_4s"),
    "swin_s3": _model(
        "swin_tiny_patch4_window7_224",
        64,
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "volo": _family(
        VOLO,
        64,
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(32, 64, 64, 64),
        num_heads=(2, 4, 4, 4),
    ),
}
