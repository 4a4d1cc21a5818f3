"""What torchmetrics makes of outputs is what it makes of them in one process."""

from __future__ import annotations

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("strategy", "inputs"), [("fsdp", "global"), ("ddp", "local")])
def test_metrics_are_those_of_one_process(strategy: str, inputs: str) -> None:
    env = {"STRATEGY": strategy, "INPUTS": inputs}
    for rank in spawn("tests.runtime.metric_workers.metrics", 2, env=env):
        assert isinstance(rank, dict) and len(rank) >= 8
        assert max(rank.values()) < 1e-5, rank
