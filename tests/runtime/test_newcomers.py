"""Parameters that come to a model after it was compiled, and take the place of others, train as on
one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from tests.runtime.newcomers_workers import Net, prune_in_turns
from tests.runtime.spawn import spawn


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownOpWarning")
def test_what_hooks_make_of_parameters_is_that_of_now() -> None:
    eager = Net().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    ours: Any = autopar.compile(copy.deepcopy(eager))
    for net in (eager, ours):
        torch.nn.utils.weight_norm(net.b)
        torch.manual_seed(0)
        prune_in_turns(net, x)
    close = torch.testing.assert_close
    close(ours.b.weight, eager.b.weight, rtol=0.0, atol=1e-12)
    close(ours.a.weight_mask, eager.a.weight_mask, rtol=0.0, atol=0.0)
    close(ours(x), eager(x))
    assert len(ours.plans) == 2, "pruned or not, and not one for each mask or step"


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.newcomers_workers.two", 2)


@pytest.mark.processes
def test_changed_models_train_as_on_one_device(ranks: list[Any]) -> None:
    assert [rank["wrong"] for rank in ranks] == [[], []]


@pytest.mark.nightly
@pytest.mark.processes
def test_models_changed_in_any_way_train_as_on_one_device() -> None:
    assert spawn("tests.runtime.newcomers_workers.two_more", 2) == [[], []]


@pytest.mark.processes
def test_what_cannot_be_is_told(ranks: list[Any]) -> None:
    for told in (rank["told"] for rank in ranks):
        assert "a.weight and b.weight are two that lie in the same memory" in told["memory"]
        assert "leave assign=True out" in told["assigned"]
        assert "a model in stages takes no new ones after its first call" in told["staged"]
