"""Parameters that come to a model after it was compiled, and take the place of others, train as on
one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.newcomers_workers.two", 2)


def test_changed_models_train_as_on_one_device(ranks: list[Any]) -> None:
    assert [rank["wrong"] for rank in ranks] == [[], []]


def test_what_cannot_be_is_told(ranks: list[Any]) -> None:
    for told in (rank["told"] for rank in ranks):
        assert "a.weight and b.weight are two that lie in the same memory" in told["memory"]
        assert "leave assign=True out" in told["assigned"]
        assert "a model in stages takes no new ones after its first call" in told["staged"]
