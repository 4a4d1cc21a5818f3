"""transformers: from sequence to sequence."""

from __future__ import annotations

from typing import Any

from tests.zoo.public.tiny import SEQ, VOCAB, WIDTH, ids, model, padding

_T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
_LED = {**_BART, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
del _LED["max_position_embeddings"]
_SWITCH = {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_ALL = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
"""No layer is left out by chance."""
_PROPHET = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "encoder_ffn_dim": 64,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}
_MARIAN = {**_BART, "pad_token_id": 0, "decoder_start_token_id": 0}


def _pair(kind: str, *, seq: int = SEQ, mask: bool = False, **options: Any) -> Any:
    def build() -> Any:
        inputs = {"input_ids": ids(seq), "labels": ids()}
        if mask:
            inputs["attention_mask"] = padding(seq)
        return model(kind, **options), inputs

    return build


def _encoder_decoder() -> Any:
    import transformers

    options = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    encoder, decoder = transformers.BertConfig(**options), transformers.BertConfig(**options)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    inputs = {"input_ids": ids(), "labels": ids()}
    return transformers.EncoderDecoderModel(config), inputs


MODELS = {
    "T5ForConditionalGeneration": _pair("T5ForConditionalGeneration", **_T5),
    "T5, padded": _pair("T5ForConditionalGeneration", mask=True, **_T5),
    "MT5ForConditionalGeneration": _pair("MT5ForConditionalGeneration", **_T5),
    "UMT5ForConditionalGeneration": _pair("UMT5ForConditionalGeneration", **_T5),
    "LongT5 (local)": _pair("LongT5ForConditionalGeneration", local_radius=3, **_T5),
    "LongT5 (transient global)": _pair(
        "LongT5ForConditionalGeneration",
        local_radius=3,
        encoder_attention_type="transient-global",
        global_block_size=4,
        **_T5,
    ),
    "SwitchTransformers": _pair(
        "SwitchTransformersForConditionalGeneration", dropout_rate=0.0, **_SWITCH
    ),
    "SwitchTransformers (dropout)": _pair("SwitchTransformersForConditionalGeneration", **_SWITCH),
    "BartForConditionalGeneration": _pair("BartForConditionalGeneration", **_BART),
    "BartForConditionalGeneration, padded": _pair(
        "BartForConditionalGeneration", mask=True, **_BART
    ),
    "MBartForConditionalGeneration": _pair("MBartForConditionalGeneration", **_BART),
    "PegasusForConditionalGeneration": _pair("PegasusForConditionalGeneration", **_BART),
    "PegasusXForConditionalGeneration": _pair(
        "PegasusXForConditionalGeneration", num_global_tokens=4, block_size=8, **_BART
    ),
    "LEDForConditionalGeneration": _pair("LEDForConditionalGeneration", attention_window=8, **_LED),
    "M2M100ForConditionalGeneration": _pair("M2M100ForConditionalGeneration", **_BART, **_ALL),
    "M2M100 (LayerDrop)": _pair("M2M100ForConditionalGeneration", **_BART),
    "MarianMTModel": _pair("MarianMTModel", **_MARIAN),
    "BlenderbotForConditionalGeneration": _pair("BlenderbotForConditionalGeneration", **_BART),
    "BlenderbotSmallForConditionalGeneration": _pair(
        "BlenderbotSmallForConditionalGeneration", **_BART
    ),
    "BigBirdPegasusForConditionalGeneration": _pair(
        "BigBirdPegasusForConditionalGeneration", attention_type="original_full", **_BART
    ),
    "ProphetNetForConditionalGeneration": _pair("ProphetNetForConditionalGeneration", **_PROPHET),
    "PLBartForConditionalGeneration": _pair("PLBartForConditionalGeneration", **_BART),
    "EncoderDecoderModel": _encoder_decoder,
}
