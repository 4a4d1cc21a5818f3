"""Models of images, and a sequence model of one's own."""

from __future__ import annotations

from tests.zoo.every import EveryPlan


class TestImagesAndSequences(EveryPlan):
    names = ("resnet", "unet", "sequence")
    variants = ("mobile",)
