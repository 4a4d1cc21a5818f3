"""transformers: vision, and vision with text."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.public.tiny import BATCH, CLASSES, VOCAB, WIDTH, ids, images, model

_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [4, 2],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}


def _classifier(kind: str, size: int = 32, **options: Any) -> Any:
    def build() -> Any:
        labels = torch.randint(CLASSES, (BATCH,))
        made = model(kind, num_labels=CLASSES, **options)
        return made, {"pixel_values": images(size), "labels": labels}

    return build


def _plain(kind: str, size: int = 32, **options: Any) -> Any:
    return lambda: (model(kind, **options), {"pixel_values": images(size)})


def _segmenter() -> Any:
    made = model("SegformerForSemanticSegmentation", num_labels=CLASSES, **_SEGFORMER)
    labels = torch.randint(CLASSES, (BATCH, 32, 32))
    return made, {"pixel_values": images(), "labels": labels}


def _two_towers(kind: str) -> Any:
    def build() -> Any:
        made = model(kind, text_config=dict(_TEXT), vision_config=dict(_VIT), projection_dim=16)
        inputs = {"input_ids": ids(), "pixel_values": images()}
        return made, {**inputs, "return_loss": True}

    return build


def _detr() -> Any:
    import transformers

    backbone = transformers.ResNetConfig(**_RESNET, out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=6,
    )
    return transformers.DetrForObjectDetection(config), {"pixel_values": images(64)}


def _vilt() -> Any:
    made = model("ViltModel", **{**_TEXT, **_VIT})
    return made, {"input_ids": ids(), "pixel_values": images()}


def _llava() -> Any:
    """Its first words stand for the patches of a picture."""
    image = VOCAB - 1
    vision = {"model_type": "clip_vision_model", **_VIT}
    text = {"model_type": "llama", **_TEXT}
    made = model(
        "LlavaForConditionalGeneration",
        vision_config=vision,
        text_config=text,
        image_token_id=image,
        vision_feature_layer=-1,
    )
    patches = (_VIT["image_size"] // _VIT["patch_size"]) ** 2
    words = ids() % image
    given = torch.cat([torch.full((BATCH, patches), image), words], 1)
    labels = torch.cat([torch.full((BATCH, patches), -100), words], 1)
    return made, {"input_ids": given, "labels": labels, "pixel_values": images()}


MODELS = {
    "ViTForImageClassification": _classifier("ViTForImageClassification", **_VIT),
    "DeiTForImageClassification": _classifier("DeiTForImageClassification", **_VIT),
    "BeitForImageClassification": _classifier("BeitForImageClassification", **_VIT),
    "Dinov2ForImageClassification": _classifier("Dinov2ForImageClassification", **_VIT),
    "ViTMAEForPreTraining": _plain(
        "ViTMAEForPreTraining",
        **_VIT,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    ),
    "SwinForImageClassification": _classifier("SwinForImageClassification", **_SWIN),
    "Swinv2ForImageClassification": _classifier("Swinv2ForImageClassification", **_SWIN),
    "ConvNextForImageClassification": _classifier("ConvNextForImageClassification", **_STAGES),
    "ConvNextV2ForImageClassification": _classifier("ConvNextV2ForImageClassification", **_STAGES),
    "ResNetForImageClassification": _classifier("ResNetForImageClassification", **_RESNET),
    "RegNetForImageClassification": _classifier(
        "RegNetForImageClassification", **_RESNET | {"layer_type": "y"}, groups_width=4
    ),
    "MobileNetV2ForImageClassification": _classifier(
        "MobileNetV2ForImageClassification", depth_multiplier=0.25
    ),
    "MobileViTForImageClassification": _classifier(
        "MobileViTForImageClassification",
        64,
        image_size=64,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
        num_attention_heads=2,
    ),
    "LevitForImageClassification": _classifier(
        "LevitForImageClassification",
        64,
        image_size=64,
        hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        down_ops=[["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 4, 2, 2, 2]],
    ),
    "PvtV2ForImageClassification": _classifier(
        "PvtV2ForImageClassification",
        64,
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 8],
    ),
    "CvtForImageClassification": _classifier(
        "CvtForImageClassification",
        embed_dim=[16, 32, 48],
        num_heads=[1, 2, 3],
        depth=[1, 2, 3],
    ),
    "PoolFormerForImageClassification": _classifier(
        "PoolFormerForImageClassification", 64, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1]
    ),
    "FocalNetForImageClassification": _classifier(
        "FocalNetForImageClassification",
        image_size=32,
        embed_dim=16,
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        hidden_sizes=[16, 32],
    ),
    "EfficientNetForImageClassification": _classifier(
        "EfficientNetForImageClassification",
        64,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
        image_size=64,
    ),
    "SegformerForSemanticSegmentation": _segmenter,
    "DPTForDepthEstimation": _plain(
        "DPTForDepthEstimation",
        **_VIT | {"num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    ),
    "GLPNForDepthEstimation": _plain(
        "GLPNForDepthEstimation",
        64,
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        depths=[1, 1, 1, 1],
    ),
    "DetrForObjectDetection": _detr,
    "YolosForObjectDetection": _plain(
        "YolosForObjectDetection", **_VIT | {"image_size": [32, 32]}, num_detection_tokens=5
    ),
    "CLIPModel": _two_towers("CLIPModel"),
    "SiglipModel": _two_towers("SiglipModel"),
    "LlavaForConditionalGeneration": _llava,
    "ViltModel": _vilt,
    "VideoMAEForVideoClassification": lambda: (
        model("VideoMAEForVideoClassification", **_VIT, num_frames=4),
        {"pixel_values": torch.randn(BATCH, 4, 3, 32, 32)},
    ),
}
