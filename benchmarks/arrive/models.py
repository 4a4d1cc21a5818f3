"""What people plan in 2026: models on the meta device in bfloat16, with their batches. Fields of
configurations that are not said are as the class in transformers has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """`build` makes the model and its batch. All options but `options` are as they come."""

    build: Callable[[], Built]
    cluster: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _decoder(kind: str, batch: int, sequence: int, **fields: Any) -> Callable[[], Built]:
    """A causal language model of transformers, with its loss."""

    def build() -> Built:
        import transformers

        known = {"tie_word_embeddings": False, "use_cache": False}
        config = getattr(transformers, f"{kind}Config")(**known | fields)
        return getattr(transformers, f"{kind}ForCausalLM")(config), _tokens(batch, sequence)

    return build


def _tokens(batch: int, sequence: int) -> dict[str, Tensor]:
    words = torch.empty(batch, sequence, dtype=torch.int64)
    return {"input_ids": words, "labels": words}


def _llama(
    hidden: int, inner: int, layers: int, heads: int, batch: int, sequence: int
) -> Callable[[], Built]:
    return _decoder(
        "Llama", batch, sequence, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        vocab_size=128_256, max_position_embeddings=max(8192, sequence),
    )  # fmt: skip


def _llama_8b(batch: int, sequence: int) -> Callable[[], Built]:
    return _llama(4096, 14_336, 32, 32, batch, sequence)


def _llama_70b(batch: int, sequence: int) -> Callable[[], Built]:
    return _llama(8192, 28_672, 80, 64, batch, sequence)


def _lora() -> Built:
    """LoRA of rank 16 on all linear layers of attention and MLP of Llama-70B."""
    from peft import LoraConfig, get_peft_model

    model, inputs = _llama_70b(16, 4096)()
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, target_modules=layers)), inputs  # pyright: ignore[reportArgumentType]


def _pictures(kind: str, batch: int, **fields: Any) -> Callable[[], Built]:
    """A classifier of pictures of transformers, with its loss."""

    def build() -> Built:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**fields)
        pictures = torch.empty(batch, 3, 224, 224)
        labels = torch.empty(batch, dtype=torch.int64)
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        return model, {"pixel_values": pictures, "labels": labels}

    return build


def _t5() -> Built:
    """T5 of 11 billion parameters."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=1024, d_kv=128, d_ff=65_536, num_layers=24, num_heads=128)
    config.update({"use_cache": False, "decoder_start_token_id": 0})
    return T5ForConditionalGeneration(config), _tokens(512, 512)


class _Block(nn.Module):
    """A block of a diffusion transformer: six vectors for the noise level shift, scale and gate
    attention and MLP; attention to the text stands between them."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.level = nn.Parameter(torch.empty(6, width))
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=affine) for affine in (False, True, False)
        )
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.from_text = nn.Linear(width, width)
        self.on_queries, self.on_keys, self.on_text_queries, self.on_text_keys = (
            nn.RMSNorm(width) for _ in range(4)
        )
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU("tanh"), nn.Linear(inner, width))

    def forward(self, x: Tensor, text: Tensor, level: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = (self.level + level).unsqueeze(2).unbind(1)
        first, second, third = self.norms
        q, k, v = self.qkv(first(x) * (1 + scale) + shift).chunk(3, -1)
        x = x + gate * self.out(self._attend(self.on_queries(q), self.on_keys(k), v))
        k, v = self.kv(text).chunk(2, -1)
        q = self.on_text_queries(self.q(second(x)))
        x = x + self.from_text(self._attend(q, self.on_text_keys(k), v))
        return x + gate_2 * self.mlp(third(x) * (1 + scale_2) + shift_2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class VideoDiT(nn.Module):
    """A diffusion transformer of 14 billion parameters on the latent numbers of a video."""

    def __init__(self, width: int = 5120, inner: int = 13_824, heads: int = 40, blocks: int = 40):
        super().__init__()
        self.width = width
        self.patches, self.text = nn.Linear(64, width), nn.Linear(4096, width)
        self.level = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(_Block(width, inner, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, latent: Tensor, text: Tensor, level: Tensor, target: Tensor) -> Tensor:
        x, words = self.patches(latent), self.text(text)
        levels = self.level(level).unflatten(-1, (6, self.width))
        for block in self.blocks:
            x = block(x, words, levels)
        return (self.head(self.norm(x)).float() - target.float()).square().mean()


def _video(batch: int = 64, tokens: int = 32_760) -> Built:
    latent = torch.empty(batch, tokens, 64)
    inputs = {"latent": latent, "text": torch.empty(batch, 512, 4096)}
    return VideoDiT(), inputs | {"level": torch.empty(batch, 256), "target": latent}


MIXTRAL = _decoder(
    "Mixtral", 512, 4096,
    hidden_size=6144, intermediate_size=16_384, num_hidden_layers=56, num_attention_heads=48,
    num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32_768,
    sliding_window=None,
)  # fmt: skip
QWEN = _decoder(
    "Qwen3Moe", 1024, 4096,
    hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64,
    head_dim=128, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    vocab_size=151_936,
)  # fmt: skip
VIT = _pictures(
    "ViT", 2048,
    hidden_size=6144, intermediate_size=24_576, num_hidden_layers=48, num_attention_heads=48,
    patch_size=14, image_size=224, num_labels=29_593,
)  # fmt: skip

CASES: Mapping[str, Case] = {
    "Llama-8B, 64 x 2,048, mesh 8x8": Case(_llama_8b(64, 2048), "8x8xH100", {"mesh": "8x8"}),
    "Llama-8B, 64 x 2,048": Case(_llama_8b(64, 2048), "8x8xH100"),
    "Mixtral-8x22B, 512 x 4,096": Case(MIXTRAL, "8x8xH100"),
    "Qwen3-235B-A22B, 1,024 x 4,096": Case(QWEN, "16x8xH100"),
    "GPT-OSS-120B, 1,280 x 4,096": Case(_decoder("GptOss", 1280, 4096), "8x8xH100"),
    "LoRA of Llama-70B, 16 x 4,096": Case(_lora, "8xH100"),
    "Llama-70B, 512 x 8,192": Case(_llama_70b(512, 8192), "8x8xH100"),
    "DeepSeek-V3, 2,048 x 4,096": Case(_decoder("DeepseekV3", 2048, 4096), "32x8xH100"),
    "video DiT of 14B, 64 x 32,760": Case(_video, "8x8xH100"),
    "Llama-8B, 1 x 1,048,576": Case(_llama_8b(1, 1_048_576), "8x8xH100"),
    "ViT-22B, 2,048": Case(VIT, "16x8xH100"),
    "Llama-8B, 128 x 8,192": Case(_llama_8b(128, 8192), "8xH100"),
    "Llama-8B, 1,024 x 8,192": Case(_llama_8b(1024, 8192), "8x8xH100"),
    "Llama-8B, 512 x 2,048": Case(_llama_8b(512, 2048), "64x8xL4"),
    "Llama-405B, 252 x 8,192": Case(_llama(16_384, 53_248, 126, 128, 252, 8192), "72x8xH100"),
    "T5-11B, 512 x 512": Case(_t5, "8xH100"),
    "ResNet-50, 2,048": Case(_pictures("ResNet", 2048), "8xH100"),
}
"""Sequences by tokens, or pictures, of a batch."""


def built(case: str) -> Built:
    """The model of a case and its batch, on the meta device in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return CASES[case].build()
    finally:
        torch.set_default_dtype(before)
