"""Tiny models of the families people train, built from configurations, without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import tests.torchvision_schemas  # noqa: F401  (before transformers, which imports torchvision)
from tests.zoo import convolutions, decoders, encoders, sequences

Made = tuple[nn.Module, dict[str, Any]]
"""A model and the keyword arguments to call it with."""

ZOO: Mapping[str, Callable[[], Made]] = {
    "opt": decoders.opt,
    "gpt2": decoders.gpt2,
    "llama": decoders.llama,
    "qwen": decoders.qwen,
    "gemma": decoders.gemma,
    "mixtral": decoders.mixtral,
    "grouped": decoders.grouped,
    "bert": encoders.bert,
    "vit": encoders.vit,
    "t5": encoders.t5,
    "t5_encoder": encoders.t5_encoder,
    "resnet": convolutions.resnet,
    "unet": convolutions.unet,
    "mobile": convolutions.mobile,
    "sequence": sequences.sequence,
}
