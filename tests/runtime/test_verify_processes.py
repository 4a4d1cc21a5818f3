"""`autopar.compile(..., verify=True)` on two processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn


@pytest.mark.processes
def test_programs_are_compared_with_eager_before_they_are_used() -> None:
    ranks: list[Any] = spawn("tests.runtime.verify_workers.two", 2)
    for seen in ranks:
        assert seen["distance"] < 1e-5
        assert "tensors differ from eager" in seen["told"]
        assert seen["plans"] == 2
