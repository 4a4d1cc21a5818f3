"""Scripts of the patterns that public ones have are on several ranks what they are on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.pattern_workers import PATTERNS
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_scripts_are_what_they_are_on_one_device(num_ranks: int, tmp_path: Path) -> None:
    ranks = spawn(
        "tests.integrations.pattern_workers.all_patterns", num_ranks, env={"FOLDER": str(tmp_path)}
    )
    for found in ranks:
        assert isinstance(found, dict)
        assert len(found) == 2 * len(PATTERNS) - 1
        far = {name: value for name, value in found.items() if not value <= 2e-5}
        assert not far, far
