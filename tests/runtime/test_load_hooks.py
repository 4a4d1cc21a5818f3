"""weights= of models whose modules change the names and tensors of a checkpoint as they load."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autopar.runtime.checkpoint.renaming import as_loaded
from tests.runtime import load_workers
from tests.runtime.spawn import spawn

TOLERANCE = 1e-5


def check(seen: dict[str, dict[str, Any]]) -> None:
    for name, each in seen.items():
        assert each["values"] < TOLERANCE and each["loss"] < TOLERANCE, (name, each)


def test_a_checkpoint_is_read_as_load_state_dict_does() -> None:
    check(load_workers.loads())


@pytest.mark.processes
def test_ranks_read_their_shards_of_what_is_only_renamed() -> None:
    for each in spawn("tests.runtime.load_workers.loads", 2):
        assert isinstance(each, dict)
        check(each)
        assert each["renamed"]["read"] == each["weight norm"]["read"] == 0.5
        assert each["joined"]["read"] == 1.0


def test_the_model_is_left_as_it_is() -> None:
    table = dict(vars(nn.Module))
    assert as_loaded(load_workers.Renamed(), {}) == {}
    assert dict(vars(nn.Module)) == table
