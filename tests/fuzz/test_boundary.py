"""Scripts nobody wrote see on several ranks what they see on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes
CHUNK, NIGHTLY = 6, 240


@pytest.mark.parametrize(
    ("first", "num_ranks"),
    [
        pytest.param(first, ranks, marks=[pytest.mark.nightly] if first or ranks > 2 else [])
        for first in range(0, NIGHTLY, CHUNK)
        for ranks in ((2, 3) if first % (4 * CHUNK) == 0 else (2,))
    ],
)
def test_drawn_scripts_see_what_they_see_on_one_device(
    first: int, num_ranks: int, tmp_path: Path
) -> None:
    asked = {"FOLDER": str(tmp_path), "FIRST": str(first), "COUNT": str(CHUNK)}
    ranks = spawn("tests.fuzz.boundary.all_drawn", num_ranks, env=asked)
    for rank, found in enumerate(ranks):
        assert isinstance(found, dict)
        assert len(found) == (CHUNK if rank else 2 * CHUNK)
        assert {number: said for number, said in found.items() if said} == {}
