"""What each model of the zoo is put to, on every mesh, whatever the plan."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.zoo.cases import evaluated, trained
from tests.zoo.equality import MESHES, check_any_plan, check_plan_chosen

SEEDS = range(5)
DAILY_SEEDS = 2
"""Of the random plans, those that `make test` runs; `make nightly` runs the others."""

VARIANTS_MESH = (2, 2)


class EveryPlan:
    """Computes what eager computes, trained and evaluated. Base of the tests in a file of their
    own, so that files can run side by side.

    `variants` are near relatives of other models, and `drawn` what no solver is to choose for: they
    have one random plan a mesh instead of five, variants the one chosen on two axes alone. In
    inference there is one random plan a mesh too, and none is chosen on three axes. `make test`
    runs two of the five, one on three axes, where of the plans chosen it runs that of the first of
    `names`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[str, ...]] = ()
    drawn: ClassVar[tuple[str, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        fewer = (*self.variants, *self.drawn)
        seeds = [(n, seed) for n in self.names for seed in SEEDS] + [(n, 0) for n in fewer]
        match metafunc.function.__name__:
            case "test_any_plan":
                found = [
                    pytest.param(n, sizes, seed, marks=pytest.mark.nightly if by_night else ())
                    for n, seed in seeds
                    for sizes in MESHES
                    for by_night in [seed >= (1 if sizes == MESHES[-1] else DAILY_SEEDS)]
                ]
                metafunc.parametrize(("name", "sizes", "seed"), found, ids=str)
            case "test_the_plan_chosen":
                chosen = [
                    pytest.param(n, sizes, marks=pytest.mark.nightly if by_night else ())
                    for n in self.names
                    for sizes in MESHES
                    for by_night in [sizes == MESHES[-1] and n != self.names[0]]
                ]
                chosen += [pytest.param(n, VARIANTS_MESH) for n in self.variants]
                metafunc.parametrize(("name", "sizes"), chosen, ids=str)
            case "test_any_plan_of_inference":
                evaluations = [(n, sizes) for n in self.names for sizes in MESHES]
                metafunc.parametrize(("name", "sizes"), evaluations, ids=str)
            case "test_the_plan_chosen_for_inference":
                evaluations = [(n, sizes) for n in self.names for sizes in MESHES[:-1]]
                metafunc.parametrize(("name", "sizes"), evaluations, ids=str)
            case _:
                pass

    @pytest.mark.breadth(7)
    def test_any_plan(self, name: str, sizes: tuple[int, ...], seed: int) -> None:
        check_any_plan(trained(name), sizes, seed)

    @pytest.mark.breadth(4)
    def test_the_plan_chosen(self, name: str, sizes: tuple[int, ...]) -> None:
        check_plan_chosen(trained(name), sizes)

    @pytest.mark.breadth(3)
    def test_any_plan_of_inference(self, name: str, sizes: tuple[int, ...]) -> None:
        check_any_plan(evaluated(name), sizes, 0)

    @pytest.mark.breadth(3)
    def test_the_plan_chosen_for_inference(self, name: str, sizes: tuple[int, ...]) -> None:
        check_plan_chosen(evaluated(name), sizes)
