"""What the processes of `test_ranks.py` do on a device that is none of the host's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import device
from tests.accelerator import standin

LIBRARY = "AUTOPAR_TEST_STANDIN"
"""The variable of the environment with where the device's library is."""


def _begin() -> None:
    torch.set_num_threads(1)
    standin.register(Path(os.environ[LIBRARY]))
    os.environ[device.VARIABLE] = standin.NAME
    dist.init_process_group(f"cpu:gloo,{standin.NAME}:{standin.NAME}")


def few() -> dict[str, Any]:
    """A schedule, and what scripts do with parameters and outputs."""
    _begin()
    from tests.cuda.ranks import trained_as
    from tests.runtime import output_workers, stage_workers

    cases: dict[str, Callable[[], Any]] = {
        "scripts": stage_workers.scripts,
        "metrics": output_workers.metrics,
        "gathered": output_workers.stays_in_shards,
        "writes": output_workers.writes,
    }
    found = {"1f1b": trained_as("1f1b", cluster="2xcpu")}
    return found | {name: case() for name, case in cases.items()}


def more() -> dict[str, dict[str, float]]:
    """All other ways of ranks that need no kernels of their own, and scripts."""
    _begin()
    from tests.cuda.ranks import CASES, trained_as
    from tests.runtime import stage_workers

    cases = [case for case in CASES if "inductor" not in case]
    found = {case: trained_as(case, cluster="2xcpu") for case in cases}
    for case in (
        stage_workers.backward_in_two_parts,
        stage_workers.dropout,
        stage_workers.optimizers,
        stage_workers.checkpoints,
        stage_workers.frozen_and_made_again,
        stage_workers.gradients_of_several_stages,
        stage_workers.other_calls,
    ):
        found[case.__name__] = case()
    return found
