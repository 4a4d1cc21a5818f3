"""Models of images and a sequence model of one's own compute what eager computes, on every
mesh, whatever the plan."""

from __future__ import annotations

import pytest

from tests.zoo.cases import evaluated, trained
from tests.zoo.equality import MESHES, check_any_plan, check_plan_chosen

NAMES = ("resnet", "unet", "sequence")
VARIANTS = ("mobile",)
"""Near relatives of other models, with one random plan a mesh instead of five."""

PLANS = [(name, seed) for name in NAMES for seed in range(5)] + [(name, 0) for name in VARIANTS]
CHOSEN = [(name, sizes) for name in NAMES for sizes in MESHES] + [(v, (2, 2)) for v in VARIANTS]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("name", "seed"), PLANS)
def test_any_plan(name: str, sizes: tuple[int, ...], seed: int) -> None:
    check_any_plan(trained(name), sizes, seed)


@pytest.mark.parametrize(("name", "sizes"), CHOSEN, ids=str)
def test_the_plan_chosen(name: str, sizes: tuple[int, ...]) -> None:
    check_plan_chosen(trained(name), sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_plan_of_inference(name: str, sizes: tuple[int, ...]) -> None:
    check_any_plan(evaluated(name), sizes, 0)


@pytest.mark.parametrize("sizes", MESHES[:-1], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_chosen_for_inference(name: str, sizes: tuple[int, ...]) -> None:
    check_plan_chosen(evaluated(name), sizes)
