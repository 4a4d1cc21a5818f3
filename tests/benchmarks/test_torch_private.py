"""The private torch API of the benchmarks is what they take it for."""

from __future__ import annotations

import torch._functorch.config as functorch

from benchmarks.torch_private import memory_budget


def test_the_memory_budget_is_an_option() -> None:
    with memory_budget(0.25):
        assert functorch.activation_memory_budget == 0.25
    assert functorch.activation_memory_budget == 1
