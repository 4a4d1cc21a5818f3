"""Collectives in forward: what they would sum is there already. They are refused by line, on every
rank, and without them the model computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    found = spawn("tests.runtime.collective_workers.talk", 2)
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("talk", "call"),
    [
        ("in_place", "torch.distributed.all_reduce"),
        ("out_of_place", "_c10d_functional.all_reduce.default"),
        ("differentiable", "torch.distributed.nn.functional.all_reduce"),
        ("gathered", "torch.distributed.all_gather"),
        ("sent", "torch.distributed.broadcast"),
        ("of_objects", "torch.distributed.all_gather_object"),
        ("met", "torch.distributed.barrier"),
    ],
)
def test_a_collective_in_forward_is_refused_by_line(ranks: list[Any], talk: str, call: str) -> None:
    for rank in ranks:
        first, remedy = rank["told"][talk].split("\n")
        assert "collective_workers.py:" in first
        assert first.endswith(f": {call} talks to other ranks")
        assert "leave the call out" in remedy and "torch.compiler.is_compiling()" in remedy


def test_without_it_the_model_is_that_of_one_process(ranks: list[Any]) -> None:
    assert all(rank["guarded"] < 1e-12 for rank in ranks)


def test_a_norm_over_all_ranks_is_one_over_the_batch(ranks: list[Any]) -> None:
    assert all(rank["normed"] < 1e-12 for rank in ranks)
