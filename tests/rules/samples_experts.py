"""Arguments to prove the rules of grouped matrix products with."""

from __future__ import annotations

import torch
from transformers.integrations import moe  # noqa: F401 - registers the fallback

from tests.rules.making import F, H
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
