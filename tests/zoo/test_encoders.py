"""Encoders, and T5."""

from __future__ import annotations

from tests.zoo.every import EveryPlan


class TestEncoders(EveryPlan):
    names = ("bert", "vit", "t5")
    variants = ("t5_encoder",)
