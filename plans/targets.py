"""What the project guards with golden plans, beside models of its zoo: those of its benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks import models

Target = tuple[nn.Module, Callable[[int], dict[str, Any]]]
"""A model, and its inputs as a function of the global batch."""


def llama_8b() -> Target:
    """Two of the layers of Llama-8B: more of them change decisions only where memory binds."""
    return models.llama_8b(2), lambda batch: models.tokens(128_256, batch, 2048, "meta")


def gpt2() -> Target:
    """GPT-2, whose vocabulary of 50,257 words no number of devices divides."""
    return models.gpt2(tiny=False), lambda batch: models.tokens(50_257, batch, 1024, "meta")


def resnet() -> Target:
    """A small ResNet."""
    return models.resnet_small(), partial(_images, size=32)


def _images(batch: int, size: int) -> dict[str, Any]:
    return models.images(10, batch, size)
