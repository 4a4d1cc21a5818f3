"""Files that scripts write themselves hold whole tensors, and adapters of peft go through them."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import torch as library

from autopar.runtime.checkpoint.files import _TAKERS
from tests.runtime import file_workers
from tests.runtime.spawn import spawn

TOLERANCE = 1e-5


def check(seen: dict[str, Any]) -> None:
    for kind, found in seen.items():
        for name, far in found.items():
            assert far < TOLERANCE, (kind, name, far)


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_files_in_one_process() -> None:
    check(file_workers.both())


@pytest.mark.processes
def test_files_of_two_ranks_hold_whole_tensors() -> None:
    for each in spawn("tests.runtime.file_workers.both", 2):
        assert isinstance(each, dict)
        check(each)


def test_safetensors_takes_tensors_where_it_is_relied_on() -> None:
    assert any(hasattr(library, name) for name in _TAKERS)
