"""diffusers: U-Nets, transformers and autoencoders, as small as their own tests have them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

BATCH, SIZE = 4, 16


def _noisy(channels: int = 4, **more: Any) -> dict[str, Any]:
    sample = torch.randn(BATCH, channels, SIZE, SIZE)
    return {"sample": sample, "timestep": torch.randint(1000, (BATCH,)), **more}


def unet() -> Any:
    model = diffusers.UNet2DModel(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        in_channels=4,
        out_channels=4,
        sample_size=SIZE,
    )
    return model, _noisy()


def unet_condition() -> Any:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIZE,
    )
    return model, _noisy(encoder_hidden_states=torch.randn(BATCH, 6, 16))


def unet_1d() -> Any:
    model = diffusers.UNet1DModel(
        block_out_channels=(32, 32),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
        extra_in_channels=64,
        sample_size=SIZE,
    )
    timestep = torch.randint(1000, (BATCH,))
    return model, {"sample": torch.randn(BATCH, 2, 32), "timestep": timestep}


def unet_3d() -> Any:
    model = diffusers.UNet3DConditionModel(
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIZE,
    )
    inputs = _noisy(encoder_hidden_states=torch.randn(BATCH, 6, 16))
    inputs["sample"] = torch.randn(BATCH, 4, 2, SIZE, SIZE)
    return model, inputs


def autoencoder() -> Any:
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
    )
    return model, {"sample": torch.randn(BATCH, 3, SIZE, SIZE)}


def vq() -> Any:
    model = diffusers.VQModel(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=8,
        num_vq_embeddings=32,
    )
    return model, {"sample": torch.randn(BATCH, 3, SIZE, SIZE)}


def tiny_autoencoder() -> Any:
    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    )
    return model, {"sample": torch.rand(BATCH, 3, SIZE, SIZE)}


def dit() -> Any:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        sample_size=SIZE // 2,
        in_channels=4,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 4, SIZE // 2, SIZE // 2),
        "timestep": torch.randint(1000, (BATCH,)),
        "class_labels": torch.randint(10, (BATCH,)),
    }


def pixart() -> Any:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        num_layers=2,
        sample_size=SIZE // 2,
        in_channels=4,
        out_channels=8,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 4, SIZE // 2, SIZE // 2),
        "timestep": torch.randint(1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 6, 16),
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }


def sd3() -> Any:
    model = diffusers.SD3Transformer2DModel(
        sample_size=SIZE // 2,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 4, SIZE // 2, SIZE // 2),
        "encoder_hidden_states": torch.randn(BATCH, 6, 32),
        "pooled_projections": torch.randn(BATCH, 64),
        "timestep": torch.randint(1000, (BATCH,)),
    }


def flux() -> Any:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, {
        "hidden_states": torch.randn(BATCH, 16, 4),
        "encoder_hidden_states": torch.randn(BATCH, 8, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.rand(8, 3),
    }


def controlnet() -> Any:
    model = diffusers.ControlNetModel(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        conditioning_embedding_out_channels=(8, 16),
    )
    return model, _noisy(
        encoder_hidden_states=torch.randn(BATCH, 6, 16),
        controlnet_cond=torch.rand(BATCH, 3, 2 * SIZE, 2 * SIZE),
    )


MODELS = {
    "UNet2DModel": unet,
    "UNet2DConditionModel": unet_condition,
    "UNet1DModel": unet_1d,
    "UNet3DConditionModel": unet_3d,
    "ControlNetModel": controlnet,
    "AutoencoderKL": autoencoder,
    "AutoencoderTiny": tiny_autoencoder,
    "VQModel": vq,
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "SD3Transformer2DModel": sd3,
    "FluxTransformer2DModel": flux,
}
