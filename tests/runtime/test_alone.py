"""What one rank does alone is exact, or an error with its line, and never a wait without end."""

from __future__ import annotations

import pytest

from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("strategy", "size", "alone"), [("fsdp", 2, 0), ("fsdp", 3, 2), ("ddp", 2, 1)]
)
def test_what_one_rank_logs_is_that_of_one_process(strategy: str, size: int, alone: int) -> None:
    env = {"STRATEGY": strategy, "ALONE": str(alone)}
    ranks = spawn("tests.runtime.alone_workers.logs", size, env=env, timeout_s=100)
    seen = ranks[alone]
    assert isinstance(seen, dict) and len(seen) > 100
    assert max(seen.values()) < 1e-5, {name: x for name, x in seen.items() if x >= 1e-5}
