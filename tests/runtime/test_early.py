"""A script that makes its optimizer before it compiles trains on two processes as on one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.early_workers.two", 2)


def test_optimizers_averages_and_hooks_made_before_are_those_of_one_process(
    ranks: list[Any],
) -> None:
    for rank in ranks:
        far = {name: seen for name, seen in rank.items() if name != "mistakes"}
        assert len(far) == 6 and {name: x for name, x in far.items() if not x < 1e-5} == {}


def test_what_cannot_follow_says_so(ranks: list[Any]) -> None:
    for seen in (rank["mistakes"] for rank in ranks):
        for what in ("a tuple", "its gradient"):
            assert "AutoparError: parameter up.weight was taken from the model before" in seen[what]
            assert "with parameters() or named_parameters(), again" in seen[what]
        assert "this backward leads to parameter " in seen["an earlier loss"]
        assert "call backward before the model is compiled" in seen["an earlier loss"]
        assert seen["afterwards"] == "no error"
