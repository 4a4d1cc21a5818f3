"""transformers: encoders of text."""

from __future__ import annotations

from typing import Any

from tests.zoo.public.tiny import CLASSES, SEQ, VOCAB, WIDTH, ids, model, padding

_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_ALBERT = {**_BERT, "embedding_size": 16}
_DISTIL = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 64,
}
_XLM = {"vocab_size": VOCAB, "emb_dim": WIDTH, "n_layers": 2, "n_heads": 4}
_XLM["max_position_embeddings"] = 64
_FUNNEL = {
    "vocab_size": VOCAB,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": WIDTH,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
}
_XLNET = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 64}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_MOBILE = {
    **_BERT,
    "embedding_size": 16,
    "intra_bottleneck_size": 16,
    "true_hidden_size": 16,
    "num_feedforward_networks": 2,
}
_PERCEIVER = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_latents": WIDTH,
    "num_latents": 8,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "max_position_embeddings": SEQ,
}


def _masked(kind: str, *, seq: int = SEQ, mask: bool = False, **options: Any) -> Any:
    """A model with a loss for each token."""

    def build() -> Any:
        inputs = {"input_ids": ids(seq), "labels": ids(seq)}
        if mask:
            inputs["attention_mask"] = padding(seq)
        return model(kind, **options), inputs

    return build


def _classes(kind: str, **options: Any) -> Any:
    """A model with a loss for each text."""

    def build() -> Any:
        made = model(kind, num_labels=CLASSES, **options)
        return made, {"input_ids": ids(), "labels": ids()[:, 0] % CLASSES}

    return build


def _splinter() -> Any:
    made = model("SplinterForQuestionAnswering", **_BERT, question_token_id=7)
    spans = ids() % SEQ
    return made, {
        "input_ids": ids(),
        "start_positions": spans[:, 0],
        "end_positions": spans[:, 1],
    }


MODELS = {
    "BertForMaskedLM": _masked("BertForMaskedLM", **_BERT),
    "BertForMaskedLM, padded": _masked("BertForMaskedLM", mask=True, **_BERT),
    "RobertaForMaskedLM": _masked("RobertaForMaskedLM", **_BERT),
    "XLMRobertaForSequenceClassification": _classes("XLMRobertaForSequenceClassification", **_BERT),
    "CamembertForTokenClassification": _masked(
        "CamembertForTokenClassification", num_labels=VOCAB, **_BERT
    ),
    "DistilBertForMaskedLM": _masked("DistilBertForMaskedLM", **_DISTIL),
    "AlbertForMaskedLM": _masked("AlbertForMaskedLM", **_ALBERT),
    "ElectraForTokenClassification": _masked(
        "ElectraForTokenClassification", num_labels=VOCAB, **_ALBERT
    ),
    "DebertaForMaskedLM": _masked("DebertaForMaskedLM", **_DEBERTA),
    "DebertaV2ForMaskedLM": _masked("DebertaV2ForMaskedLM", mask=True, **_DEBERTA),
    "FunnelForMaskedLM": _masked("FunnelForMaskedLM", **_FUNNEL),
    "XLMWithLMHeadModel": _masked("XLMWithLMHeadModel", **_XLM),
    "XLMWithLMHeadModel, padded": _masked("XLMWithLMHeadModel", mask=True, **_XLM),
    "FlaubertWithLMHeadModel": _masked("FlaubertWithLMHeadModel", **_XLM),
    "XLNetForTokenClassification": _masked(
        "XLNetForTokenClassification", num_labels=VOCAB, **_XLNET
    ),
    "LongformerForMaskedLM": _masked("LongformerForMaskedLM", attention_window=8, **_BERT),
    "BigBirdForMaskedLM": _masked("BigBirdForMaskedLM", attention_type="original_full", **_BERT),
    "BigBirdForMaskedLM, sparse": _masked(
        "BigBirdForMaskedLM", seq=64, block_size=4, num_random_blocks=2, **_BERT
    ),
    "MobileBertForMaskedLM": _masked("MobileBertForMaskedLM", **_MOBILE),
    "MPNetForMaskedLM": _masked("MPNetForMaskedLM", **_BERT),
    "ModernBertForMaskedLM": _masked("ModernBertForMaskedLM", mask=True, pad_token_id=0, **_BERT),
    "ConvBertForMaskedLM": _masked("ConvBertForMaskedLM", embedding_size=WIDTH, **_BERT),
    "SqueezeBertForMaskedLM": _masked("SqueezeBertForMaskedLM", embedding_size=WIDTH, **_BERT),
    "FNetForMaskedLM": _masked("FNetForMaskedLM", **_BERT),
    "NystromformerForMaskedLM": _masked(
        "NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=SEQ, **_BERT
    ),
    "RoFormerForMaskedLM": _masked("RoFormerForMaskedLM", embedding_size=WIDTH, **_BERT),
    "RemBertForMaskedLM": _masked(
        "RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=16, **_BERT
    ),
    "MegatronBertForMaskedLM": _masked("MegatronBertForMaskedLM", **_BERT),
    "ErnieForMaskedLM": _masked("ErnieForMaskedLM", **_BERT),
    "Data2VecTextForMaskedLM": _masked("Data2VecTextForMaskedLM", **_BERT),
    "LayoutLMForTokenClassification": _masked(
        "LayoutLMForTokenClassification", num_labels=VOCAB, **_BERT
    ),
    "PerceiverForMaskedLM": _masked("PerceiverForMaskedLM", **_PERCEIVER),
    "SplinterForQuestionAnswering": _splinter,
    "EsmForMaskedLM": _masked(
        "EsmForMaskedLM", pad_token_id=1, mask_token_id=2, mask=True, **_BERT
    ),
}
