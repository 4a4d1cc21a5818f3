"""Two ranks on a device that torch takes for an accelerator: autograd orders its streams, and
tensors of the host are on another one, as on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import standin
from tests.accelerator.workers import LIBRARY
from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("standin"))


def told(function: str, library: Path) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(LIBRARY, str(library))
        return spawn(f"tests.accelerator.workers.{function}", 2, timeout_s=500)


@pytest.fixture(scope="module")
def few(library: Path) -> Any:
    return told("few", library)


def test_ranks_train_as_one_device_does(few: Any) -> None:
    for rank in few:
        assert max(rank["1f1b"].values()) < TOLERANCE, rank["1f1b"]


def test_scripts_find_parameters_gradients_and_outputs_on_the_device(few: Any) -> None:
    for rank in few:
        seen = rank["scripts"]
        assert seen.pop("not here") > 5
        assert max(seen.values()) < TOLERANCE, seen


def test_outputs_in_shards_are_on_the_device_and_come_to_the_host(few: Any) -> None:
    for rank in few:
        assert rank["metrics"] == rank["gathered"] == []
        assert rank["writes"]["seen"]


@pytest.mark.nightly
def test_all_other_ways(library: Path) -> None:
    for rank in told("more", library):
        for case, seen in rank.items():
            assert max(seen.values()) < TOLERANCE, (case, seen)
