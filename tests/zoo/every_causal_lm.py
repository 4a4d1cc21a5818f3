"""Every causal language model of `transformers`, made small from its default configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

BATCH, SEQ, VOCAB = 4, 16, 96

_SIZES: dict[int, tuple[str, ...]] = {
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
        "encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks",
        "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups",
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "n_group",
        "topk_group", "num_expert_group", "mamba_n_groups", "n_groups", "mamba_ngroups",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        "attention_heads", "swa_num_attention_heads", "index_n_heads", "linear_num_key_heads",
        "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk",
        "n_mamba_heads",
    ),
    8: (
        "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "swa_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim",
        "attention_head_dim", "dim_head", "mamba_d_state", "state_size", "ssm_state_size",
        "kv_channels", "rotary_dim", "sliding_window", "attention_chunk_size",
        "mamba_chunk_size", "chunk_size", "attention_window_size", "d_head", "local_attention",
        "mamba_dt_rank", "time_step_rank", "hidden_size_per_layer_input", "window_size",
        "sliding_window_size",
    ),
    16: (
        "q_lora_rank", "kv_lora_rank", "o_lora_rank", "mamba_d_head", "mamba_headdim",
        "mamba_head_dim", "index_block_size",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size",
        "emb_dim", "embedding_dim", "input_embedding_size", "output_embedding_size",
        "lru_width", "moe_intermediate_size", "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "expert_ffn_hidden_size", "router_hidden_size", "shared_experts_intermediate_size",
    ),
    64: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
        "dim_ff", "dff", "d_inner", "n_inner", "feed_forward_size", "intermediate_size_mlp",
        "dense_intermediate_size", "max_position_embeddings", "n_positions", "n_ctx",
        "max_seq_len", "model_max_length", "max_source_positions", "max_target_positions",
        "context_length", "mamba_d_ssm", "image_size", "attention_hidden_size",
    ),
    VOCAB: (
        "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size",
    ),
}  # fmt: skip
_OF_FIELD = {name: size for size, names in _SIZES.items() for name in names}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_QWEN4 = {
    **_HYBRID,
    "num_key_value_heads": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}
_OF_MODEL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 32,
            "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n": {
        "text_config": _GEMMA3N, "vision_config": {"architecture": "mobilenetv3_small_050"}},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _HYBRID,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen3_5": {"text_config": _HYBRID},
    "qwen3_5_moe": {"text_config": _HYBRID},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4, "attention_head_size": 8, "num_buckets": 4, "hash_seed": 0,
        "max_position_embeddings": 16,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 16, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What each needs beside the sizes that all have."""

_IN_FLOAT32 = ("inkling2_text", "xglm")
"""Those that compute in float32 whatever their dtype is."""

_WITHOUT_LOSS = ("git", "musicgen", "musicgen_melody")
"""Those whose loss wants more than tokens."""


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration of model type `name`, with few and small layers and no dropout."""
    return _shrunk(CONFIG_MAPPING[name](), _OF_MODEL.get(name, {}))


def _shrunk(config: PreTrainedConfig, given: dict[str, Any]) -> PreTrainedConfig:
    kind: Any = type(config)
    fields = config.to_dict()
    values: dict[str, Any] = {}
    for field, default in fields.items():
        if default is None or isinstance(default, bool):
            continue
        if field in _OF_FIELD:
            values[field] = _OF_FIELD[field]
        elif field.endswith("token_id") and isinstance(default, int):
            values[field] = min(default, 3)
        elif isinstance(default, float) and ("drop" in field or "jitter" in field):
            values[field] = 0.0
    for field in kind.sub_configs:
        sub = getattr(config, field, None)
        if isinstance(sub, PreTrainedConfig):
            values[field] = _shrunk(sub, given.get(field, {})).to_dict()
    if "kv_lora_rank" in values:  # heads of latent attention have keys of their own
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["head_dim"] = values["qk_rope_head_dim"]
    return kind(**values | {k: v for k, v in given.items() if k not in kind.sub_configs})


def causal_lm(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The causal language model of type `name`, in float64 and in training, and a batch for it."""
    config = tiny_config(name)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, kind.config_class):  # that of the text model in a larger one
        parts = (getattr(config, part) for part in config.sub_configs)
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    torch.manual_seed(0)
    model = kind(config)
    model.set_experts_implementation("eager")  # the others are not there in float64
    ids = torch.randint(4, VOCAB, (BATCH, SEQ))
    inputs = {"input_ids": ids} if name in _WITHOUT_LOSS else {"input_ids": ids, "labels": ids}
    return (model if name in _IN_FLOAT32 else model.double()).train(), inputs


MODELS = {name: partial(causal_lm, name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
