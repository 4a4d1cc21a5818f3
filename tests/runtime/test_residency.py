"""A script trains as ever while its parameters live in the host's memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import autopar
from autopar.errors import ArgumentError
from tests.runtime.microbatch_workers import batch, trained
from tests.runtime.spawn import spawn
from tests.runtime.test_microbatches import TOLERANCE, check, with_dropout
from tests.runtime.workers import distance, llama


@pytest.mark.parametrize("microbatches", [1, 2])
def test_ten_steps_of_a_script(microbatches: int) -> None:
    """With another loss, batch and mode in between, and random numbers."""
    seen = trained(with_dropout(), residency="cpu", microbatches=microbatches)
    check(seen)


def hosted(compiled: autopar.CompiledModule) -> list[int]:
    """How many parameters live on the host, in each plan."""
    plans = [plan.structure.params.values() for plan in compiled.plans]
    return [sum(param.residency == "host" for param in params) for params in plans]


def test_all_programs_find_parameters_where_they_are() -> None:
    compiled = autopar.compile(llama(), residency="cpu")
    with torch.no_grad():
        compiled(**batch(0, 8))
    compiled(**batch(0, 8)).loss.backward()
    compiled(**batch(0, 6)).logits.mean().backward()
    total = len([*compiled.parameters()])
    assert hosted(compiled) == [total] * len(compiled.plans)
    assert len(compiled.plans) >= 2


def test_what_a_plan_has_on_the_host_stays_there() -> None:
    """In programs for other batches too, where a class of parameters is divided."""
    first = autopar.compile(llama())
    first(**batch(0, 8))
    structure = first.plans[-1].structure
    params = {
        name: replace(param, residency="host") if "layers.0" in name else param
        for name, param in structure.params.items()
    }
    plan = replace(first.plans[-1], structure=replace(structure, params=params))
    plain = llama()
    compiled = autopar.compile(copy.deepcopy(plain), plan=plan)
    for size in (8, 6):
        for model in (compiled, plain):
            model.zero_grad()
            model(**batch(0, size)).loss.backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert distance(p.grad, q.grad) <= TOLERANCE
    kept = sum("layers.0" in name for name in params)
    assert hosted(compiled) == [kept, kept]


def two() -> dict[str, Any]:
    return trained(llama(), residency="cpu", strategy="fsdp")


@pytest.mark.processes
def test_two_processes_in_shards() -> None:
    for seen in spawn("tests.runtime.test_residency.two", 2):
        assert isinstance(seen, dict)
        check(seen)


def test_it_is_read_before_anything_is_done() -> None:
    with pytest.raises(ArgumentError, match="residency='host': write one of cuda, cpu, auto"):
        autopar.compile(llama(), residency="host")
