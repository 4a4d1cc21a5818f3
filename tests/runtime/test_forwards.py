"""`model.forward = f` of a compiled model: f is what is traced, as it is what eager calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime import forward_workers
from tests.runtime.spawn import spawn

TOLERANCE = 1e-5


def check(seen: dict[str, Any]) -> None:
    for name, each in seen["forwards"].items():
        distances, programs = zip(*each["seen"], strict=True)
        assert max(distances) < TOLERANCE, (name, distances)
        # With labels and without: a program each, of either forward and another scale.
        assert programs[1] > programs[0] and programs[2] > programs[1], (name, programs)
        # What was there before is found again.
        assert programs[2] == programs[3] == programs[4], (name, programs)
    found = dict(seen["restored"])
    assert found.pop("programs") == 2
    assert max(found.values()) < TOLERANCE


def test_a_forward_of_ones_own_in_one_process() -> None:
    check(forward_workers.both())


@pytest.mark.processes
def test_a_forward_of_ones_own_on_two_ranks() -> None:
    for each in spawn("tests.runtime.forward_workers.both", 2):
        check(each)
