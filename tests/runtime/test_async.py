"""What `dcp.async_save` writes beside training is what was there when it was called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("way", ["thread", "shared", "process", "process_of_stages"])
def test_what_is_saved_beside_training_is_what_was_there(way: str, tmp_path: Path) -> None:
    ranks = spawn(f"tests.runtime.async_workers.{way}", 2, env={"FOLDER": str(tmp_path)})
    for rank in ranks:
        assert isinstance(rank, dict) and len(rank) > 10
        assert max(rank.values()) == 0
