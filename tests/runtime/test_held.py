"""Tensors that a forward finds in the model or around it, without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from tests.runtime.external_workers import Script, attribute, buffer
from tests.runtime.spawn import spawn


@pytest.mark.parametrize(("make", "name"), [(attribute, "kept"), (buffer, "given")])
def test_what_is_detached_is_read(make: Any, name: str) -> None:
    script: Script = make()
    setattr(script.model, name, getattr(script.model, name).detach())
    x = torch.ones(2, 6)
    expected = script.model(x)
    torch.testing.assert_close(autopar.compile(script.model)(x), expected)


@pytest.mark.processes
def test_what_is_found_is_that_of_rank_0() -> None:
    for rank in spawn("tests.runtime.held_workers.held", 2):
        assert isinstance(rank, dict)
        assert max(*rank["free"], *rank["ddp"]) < 1e-6
