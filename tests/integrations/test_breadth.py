"""`Trainer` with other models, dtypes, optimizers and plans, on two processes."""

from __future__ import annotations

import pytest

from tests.integrations.test_scripts import differences
from tests.runtime.spawn import spawn


@pytest.mark.nightly
@pytest.mark.processes
def test_trainer_gives_the_numbers_of_one_process() -> None:
    workers = "tests.integrations.breadth_workers"
    [plain] = spawn(f"{workers}.plain", 1)
    for rank in spawn(f"{workers}.compiled", 2):
        assert isinstance(rank, dict) and isinstance(plain, dict)
        different = {
            name: list(
                differences(rank[name], plain[name], name, rel=2e-2 if "bf" in name else 1e-3)
            )
            for name in plain
        }
        assert not any(different.values()), different


def _rounding(name: str) -> float:
    return 2e-2 if "bfloat16" in name else 1e-3
