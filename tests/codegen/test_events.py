"""The graphs that are generated are the schedule, event by event (the zoo's too: every test there
that compares a plan with eager checks this as well), and hold what `play` says they hold."""

from __future__ import annotations

import pytest

from autopar.codegen import generate
from tests.codegen.events import check_order, watched
from tests.faults.cases import CASES, made_once


@pytest.mark.parametrize("case", CASES)
def test_events_are_in_order(case: str) -> None:
    made = made_once(case)
    for plan in made.plans:
        with watched() as written:
            program = generate(made.traced.gm, made.traced.graph, plan)
        check_order(written, program, plan.structure.mesh.names)
