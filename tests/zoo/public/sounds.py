"""transformers: speech and sound."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.public.tiny import BATCH, CLASSES, VOCAB, WIDTH, ids, model

SAMPLES = 640

_WAVE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_STEADY = {"layerdrop": 0.0, "mask_time_prob": 0.0}
"""No chance in what is computed: no layer is left out, and no span masked."""


def _wave(kind: str, **options: Any) -> Any:
    """A classifier of waves."""

    def build() -> Any:
        labels = torch.randint(CLASSES, (BATCH,))
        made = model(kind, **_WAVE | {"num_labels": CLASSES, "classifier_proj_size": 16} | options)
        return made, {"input_values": torch.randn(BATCH, SAMPLES), "labels": labels}

    return build


def _ctc(*, loss: bool) -> Any:
    def build() -> Any:
        made = model("Wav2Vec2ForCTC", **_WAVE, **_STEADY, pad_token_id=0)
        labels = {"labels": torch.randint(1, VOCAB, (BATCH, 5))} if loss else {}
        return made, {"input_values": torch.randn(BATCH, SAMPLES), **labels}

    return build


def _spans() -> Any:
    """With the spans that are masked given, which are otherwise drawn by numpy."""
    made = model("Wav2Vec2Model", **_WAVE, layerdrop=0.0)
    steps = int(made._get_feat_extract_output_lengths(SAMPLES))
    spans = torch.rand(BATCH, steps) < 0.4
    return made, {"input_values": torch.randn(BATCH, SAMPLES), "mask_time_indices": spans}


def _whisper() -> Any:
    made = model(
        "WhisperForConditionalGeneration",
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return made, {"input_features": torch.randn(BATCH, 16, 32), "labels": ids(8)}


def _speech_to_text() -> Any:
    made = model(
        "Speech2TextForConditionalGeneration",
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        conv_channels=16,
        input_feat_per_channel=8,
    )
    return made, {"input_features": torch.randn(BATCH, 32, 8), "labels": ids(8)}


def _spectrogram() -> Any:
    made = model(
        "ASTForAudioClassification",
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=16,
        num_labels=CLASSES,
    )
    labels = torch.randint(CLASSES, (BATCH,))
    return made, {"input_values": torch.randn(BATCH, 16, 16), "labels": labels}


def _encodec() -> Any:
    made = model(
        "EncodecModel",
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        codebook_dim=16,
    )
    return made, {"input_values": torch.randn(BATCH, 1, 320)}


def _features(kind: str, **options: Any) -> Any:
    """A model of rows of features."""

    def build() -> Any:
        made = model(
            kind,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            feature_projection_input_dim=16,
            **options,
        )
        return made, {"input_features": torch.randn(BATCH, 32, 16)}

    return build


MODELS = {
    "Wav2Vec2 (defaults)": _wave("Wav2Vec2ForSequenceClassification"),
    "Wav2Vec2ForSequenceClassification": _wave("Wav2Vec2ForSequenceClassification", **_STEADY),
    "Wav2Vec2ForCTC": _ctc(loss=True),
    "Wav2Vec2ForCTC, without labels": _ctc(loss=False),
    "Wav2Vec2Model, spans given": _spans,
    "Wav2Vec2ConformerForSequenceClassification": _wave(
        "Wav2Vec2ConformerForSequenceClassification", **_STEADY
    ),
    "Wav2Vec2BertModel": _features("Wav2Vec2BertModel", **_STEADY),
    "HubertForSequenceClassification": _wave("HubertForSequenceClassification", **_STEADY),
    "WavLMForSequenceClassification": _wave("WavLMForSequenceClassification", **_STEADY),
    "UniSpeechForSequenceClassification": _wave("UniSpeechForSequenceClassification", **_STEADY),
    "SEWForSequenceClassification": _wave("SEWForSequenceClassification", **_STEADY),
    "Data2VecAudioForSequenceClassification": _wave(
        "Data2VecAudioForSequenceClassification", **_STEADY
    ),
    "WhisperForConditionalGeneration": _whisper,
    "Speech2TextForConditionalGeneration": _speech_to_text,
    "ASTForAudioClassification": _spectrogram,
    "EncodecModel": _encodec,
}
