"""Three real processes over gloo, who pass keys and values round."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


def test_a_ring_of_processes_computes_what_one_does() -> None:
    for rank in cast("list[Any]", spawn("tests.runtime.ring_workers.three", 3)):
        assert rank["causal"] < 1e-9
        assert rank["full"] < 1e-9
