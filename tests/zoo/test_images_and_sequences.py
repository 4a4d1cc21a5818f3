"""Models of images and a sequence model of one's own compute what eager computes, on every
mesh, whatever the plan."""

from __future__ import annotations

import pytest

from tests.zoo.equality import MESHES, check_any_plan, check_inference, check_plan_chosen

NAMES = ("resnet", "unet", "sequence")
VARIANTS = ("mobile",)
"""Near relatives of other models, with one random plan a mesh instead of five."""

PLANS = [(name, seed) for name in NAMES for seed in range(5)] + [(name, 0) for name in VARIANTS]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("name", "seed"), PLANS)
def test_any_plan(name: str, sizes: tuple[int, ...], seed: int) -> None:
    check_any_plan(name, sizes, seed)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES + VARIANTS)
def test_the_plan_chosen(name: str, sizes: tuple[int, ...]) -> None:
    check_plan_chosen(name, sizes)


@pytest.mark.parametrize("name", NAMES + VARIANTS)
def test_inference(name: str) -> None:
    check_inference(name, (2, 2), 0)
