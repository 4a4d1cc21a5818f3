"""What is written through views of results is there, and its gradient is right."""

from __future__ import annotations

import pytest

from tests.edge.views import WRITES
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_written_through_a_view_is_seen_and_differentiated(size: int) -> None:
    for rank in spawn("tests.edge.views.written", size):
        assert isinstance(rank, dict) and len(rank) == 4 * len(WRITES)
        assert not {name: off for name, off in rank.items() if off > 1e-9}
