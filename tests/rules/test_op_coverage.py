"""The share of torch's op database that has rules may only rise."""

from __future__ import annotations

import pytest

from tests.edge.torch_private import database, full_name
from tests.rules.op_coverage import missing, recorded, totals

COVERED = 600
"""How many ops were covered when this was last raised: `python -m tests.rules.op_coverage`."""


PARTS = 24
"""All ops take minutes: one part is tested daily."""


def test_the_record_has_not_fallen() -> None:
    covered, count = totals()
    assert covered >= COVERED
    assert covered + len(recorded()) == count


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, PARTS))]
)
def test_the_record_is_true(part: int) -> None:
    lacking = recorded()
    ops = [op for op in database(seeded=False) if full_name(op) not in lacking][part::PARTS]
    assert not {full_name(op): found for op in ops if (found := missing(op))}
