"""The private torch API that a benchmark relies on."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch._functorch.config as functorch


def memory_budget(part: float) -> AbstractContextManager[object]:
    """Inside, what `torch.compile` partitions saves that part of what keeping all activations
    takes."""
    return functorch.patch(activation_memory_budget=part)
