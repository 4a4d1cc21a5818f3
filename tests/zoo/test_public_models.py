"""The table of public models: what eager runs is verified, but for what is known to be refused."""

from __future__ import annotations

import pytest

from tests.zoo.public import FILES, entries
from tests.zoo.table import ABSENT, NOT_BY_EAGER, REFUSED, VERIFIED, apart

REFUSED_BY_NAME = (
    "causal_lm/qwen4_exp",
    "causal_lm/qwen4_exp_text",
    "causal_lm/reformer",
    "transformers/EncodecModel",
    "transformers/M2M100 (LayerDrop)",
    "transformers/SplinterForQuestionAnswering",
    "transformers/SwitchTransformers (dropout)",
    "transformers/ViltModel",
    "transformers/Wav2Vec2 (defaults)",
    "transformers/Wav2Vec2ForCTC",
)
"""What autopar refuses, in a sentence."""
LIMIT_S = 900


@pytest.mark.nightly
@pytest.mark.parametrize("name", entries())
def test_verified(name: str) -> None:
    row = apart(name, LIMIT_S)
    allowed = (REFUSED,) if name in REFUSED_BY_NAME else (VERIFIED, NOT_BY_EAGER, ABSENT)
    assert row.result in allowed, row


@pytest.mark.parametrize("part", FILES)
def test_few_are_refused(part: str) -> None:
    of_part = [name for name in entries() if name.startswith(f"{part}/")]
    refused = [name for name in of_part if name in REFUSED_BY_NAME]
    assert len(refused) <= (0.02 if part == "causal_lm" else 0.1) * len(of_part)
