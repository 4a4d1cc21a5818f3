"""Causal language models of `transformers`, all of them, as `make nightly` has it."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.table import NOT_BY_EAGER, REFUSED, VERIFIED, apart
from tests.zoo.tiny import causal_lm

KNOWN = ("gemma3n_text", "jetmoe", "xlm")
"""What autopar refuses, in a sentence."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_verified(name: str) -> None:
    row = apart(causal_lm, name)
    allowed = (REFUSED,) if name in KNOWN else (VERIFIED, NOT_BY_EAGER)
    assert row.result in allowed, row.sentence
