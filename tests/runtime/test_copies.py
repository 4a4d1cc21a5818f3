"""Whole parameters for a while, copies, averages, pickling and generation."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.module.unsharded import tensors_of
from tests.runtime import copies_workers
from tests.runtime.spawn import spawn
from tests.runtime.workers import net, points

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.copies_workers.two", 2)


@pytest.mark.processes
def test_whole_parameters_for_a_while(ranks: list[Any]) -> None:
    for rank, seen in enumerate(each["unsharded"] for each in ranks):
        assert seen["sharded"] and seen["plain"] and seen["as before"]
        assert seen["given"] == (rank == 0)
        for name in ("before the first call", "state", "forward", "kept", "undone"):
            assert seen[name] < TOLERANCE, name
        assert "got a gradient inside unsharded(), where no optimizer" in seen["train"]
        assert ("no" if rank else "another rank failed inside unsharded()") in seen["fail"]
        assert "up.weight was replaced inside unsharded()" in seen["replace"]
        assert "once is enough" in seen["nest"]
        assert "there are ranks 0 to 1" in seen["no rank"]
    assert ranks[0]["unsharded"]["saved"] < TOLERANCE
    assert "rank 1 has no parameters inside unsharded" in ranks[1]["unsharded"]["elsewhere"]


def check_averages(seen: dict[str, Any]) -> None:
    for name in ("parameters", "mean", "call", "copy", "original"):
        assert seen[name] < TOLERANCE, name
    assert seen["kind"] == "CompiledModule" and seen["plans"] == [0, 1] and seen["own"]


@pytest.mark.processes
def test_averages_and_copies_in_shards(ranks: list[Any]) -> None:
    for each in ranks:
        check_averages(each["averaged"])


def test_averages_and_copies_in_one_process() -> None:
    check_averages(copies_workers.averaged())


@pytest.mark.processes
def test_statistics_of_norms_are_made_anew_for_averages(ranks: list[Any]) -> None:
    for each in ranks:
        assert len(each["norms"]) == 4 and max(each["norms"].values()) < TOLERANCE


def test_statistics_of_norms_are_made_anew_in_one_process() -> None:
    assert max(copies_workers.updated_norms().values()) < TOLERANCE


@pytest.mark.processes
def test_shards_are_pickled_whole(ranks: list[Any]) -> None:
    for each in ranks:
        assert [*each["pickled"]] == ["outside", "inside", "alone"]
        for kind, off in each["pickled"].values():
            assert kind == "Net" and off < TOLERANCE


@pytest.mark.processes
def test_all_ranks_generate_what_one_process_does(ranks: list[Any]) -> None:
    for each in ranks:
        seen = each["generated"]
        for name in ("greedy", "sampled"):
            assert seen[name] == seen[f"{name} by eager"]
        assert seen["sampled, next number"] == seen["sampled, next by eager"]
        assert "PlanMismatchError" in seen["other prompts"]
    first = ranks[0]["generated"]
    assert first["alone"] == first["greedy"]


def test_what_is_pickled_is_the_plain_model() -> None:
    model = autopar.compile(net())
    model(*points())
    file = io.BytesIO()
    torch.save(model, file)
    torch.serialization.add_safe_globals([type(net()), nn.Linear, nn.Dropout, nn.Sequential])
    by_torch = torch.load(io.BytesIO(file.getvalue()))
    for loaded in (by_torch, pickle.loads(pickle.dumps(model))):
        assert type(loaded) is type(net())
        again = autopar.compile(loaded)
        torch.testing.assert_close(again(*points())["h"], model(*points())["h"])
    with pytest.raises(AutoparError, match=r"copy\.deepcopy it"):
        copy.copy(model)


def test_one_process_has_whole_parameters_already() -> None:
    model = autopar.compile(net())
    parameters = list(map(id, model.parameters()))
    with model.unsharded(rank=0) as whole:
        assert whole is not None and parameters == list(map(id, model.parameters()))
        torch.testing.assert_close(whole(*points())["h"], model(*points())["h"])
    assert not model.plans
    with pytest.raises(AutoparError, match="there are ranks 0 to 0"), model.unsharded(rank=1):
        pass


def test_a_model_that_generates_nothing_has_no_generate() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        autopar.compile(nn.Linear(2, 2)).generate()


def test_modules_that_list_their_weights_see_what_is_put_in_their_place() -> None:
    lstm = nn.LSTM(2, 2)
    for held in list(tensors_of(lstm, "_parameters")):
        held.put(nn.Parameter(torch.zeros_like(held.tensor)))
        assert held.now is not held.tensor
    assert all(map(operator.is_, lstm._flat_weights, lstm.parameters()))
    assert not lstm(torch.ones(1, 2))[0].any()
