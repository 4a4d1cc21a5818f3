"""Models nobody wrote compute on several meshes what they compute alone.

`make fuzz` draws more of them (FUZZ_MODELS, from number FUZZ_FIRST on), and makes those that fail
as small as it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from tests.fuzz.checking import check, run, traced_model
from tests.fuzz.drawn import Drawn, On
from tests.fuzz.models import places, programs
from tests.fuzz.numbers import drawn_numbers
from tests.fuzz.programs import Program
from tests.fuzz.regressions import REGRESSIONS
from tests.planned import plan_for

PHASES = [Phase.generate, Phase.shrink] if "FUZZ_MODELS" in os.environ else [Phase.generate]


@pytest.mark.parametrize("number", drawn_numbers(daily=5, nightly=1000))
def test_a_drawn_model_equals_eager(
    number: int, record_property: Callable[[str, object], None]
) -> None:
    """One example for each number: hypothesis would draw most of several alike."""

    @seed(number)
    @settings(
        max_examples=1,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(), on=places())
    def example(program: Program, on: list[On]) -> None:
        note(repr(program))
        found.append(check(program, on))

    found: list[Drawn] = []
    example()
    (drawn,) = found
    record_property("drawn", (sorted(drawn.model), [sorted(plan) for plan in drawn.plans]))


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_was_found_stays_right(name: str) -> None:
    found = REGRESSIONS[name]
    model, args = Program(found.source).build()
    traced = traced_model(model, args)
    run(traced, model, args, plan_for(traced.graph, found.mesh, found.pins))
