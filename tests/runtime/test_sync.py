"""Collectives of a script move whole tensors, as they do where every rank has all of them."""

from __future__ import annotations

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_see_whole_tensors(size: int) -> None:
    for rank in spawn("tests.runtime.sync_workers.synced", size):
        assert isinstance(rank, dict) and len(rank) == 32
        assert not {name: off for name, off in rank.items() if off > 1e-5}
