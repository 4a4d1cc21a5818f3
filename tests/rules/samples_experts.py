"""Arguments to prove the rules of grouped matrix products and layers of experts with."""

from __future__ import annotations

import torch
from transformers.integrations import moe  # noqa: F401 - registers the fallback

from tests.rules.making import F, H, I, U
from tests.rules.sampling import sample

_FALLBACK = "transformers.grouped_mm_fallback"
_ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)

sample(f"{_FALLBACK}.default", F(6, 4), F(3, 4, 6), _ENDS)
sample(f"{_FALLBACK}_backward.default", F(6, 4), F(3, 4, 6), _ENDS, F(6, 6))
# The kernel knows no float64, and asks for rows of 16 bytes.
_WIDE = torch.tensor([8, 8, 16], dtype=torch.int32)
sample("_grouped_mm", H(16, 16), H(3, 16, 16), _WIDE)
sample("_grouped_mm", H(16, 16), H(16, 16), _WIDE)
sample("_grouped_mm", H(3, 16, 16), H(3, 16, 16))

# 12 tokens, 2 of 12 experts each, some twice the same.
_TOKENS, _CHOSEN, _SHARES = F(12, 4), I(12, 2, high=12), U(12, 2)
for gates, gate, bias in ((2, "silu", None), (1, "relu2", F(12, 1, 6)), (2, "gelu", F(12, 2, 6))):
    layer = (_TOKENS, _CHOSEN, _SHARES, F(12, gates, 6, 4), F(12, 4, 6), bias, gate, False)
    sample("autopar.experts.default", *layer)
    sample("autopar.experts_backward.default", _TOKENS, *layer)
