"""The chains that are cut by themselves."""

from __future__ import annotations

import pytest

from autopar.solver.cutting import divide
from benchmarks import cuts


def test_the_first_stages_cannot_have_the_fastest_ways() -> None:
    found = divide(cuts.problem("32x4"))
    slower = [sum(stage[1][1:]) for stage in found.taken]  # of the blocks
    assert slower[0] > 0 and slower[-1] == 0


@pytest.mark.parametrize(("case", "kind"), [("32x4", "32 equal"), ("8x2d", "8 different")])
def test_a_case_is_solved_with_its_bound(case: str, kind: str) -> None:
    segments, stages, taken, gap = cuts.row(case)
    assert (segments, stages) == (kind, case.partition("x")[2].removesuffix("d"))
    assert float(taken) >= 0 and 0 <= float(gap.rstrip("%")) < 10
