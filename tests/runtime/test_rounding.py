"""Scripts whose model saves activations in fewer bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import ArgumentError
from autopar.plans.recipe import read_recipe
from tests.runtime.microbatch_workers import batch
from tests.runtime.spawn import spawn
from tests.runtime.workers import distance, llama, slow_devices


def test_it_is_asked_for_and_told() -> None:
    plain, given = llama(), batch(0, 8)
    compiled = autopar.compile(copy.deepcopy(plain), saved_dtype=torch.bfloat16, verify=True)
    compiled(**given).loss.backward()
    plain(**given).loss.backward()
    pairs = list(zip(compiled.parameters(), plain.parameters(), strict=True))
    grads = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    assert len(grads) == len(pairs)
    assert 1e-4 < max(distance(a, b) for a, b in grads) < 1e-2
    (plan,) = compiled.plans
    assert "saved dtype bfloat16" in plan.provenance.imposed
    again = autopar.compile(copy.deepcopy(plain), plan=plan)
    again(**given).loss.backward()
    again.eval()(input_ids=given["input_ids"])
    assert {each.structure.saved_dtype for each in again.plans} == {"bfloat16"}


def test_a_plan_of_stages_is_equal_in_float64() -> None:
    how = {"stages": 2, "microbatches": 4, "saved_dtype": "float16"}
    plan = autopar.plan(llama(), batch(0, 8), cluster=slow_devices(2), **how)
    assert {part.saved_dtype for part in plan.structure.parts} == {"float16"}
    report = autopar.verify(plan, llama(), batch(0, 8))
    assert max(each.relative for each in report.differences) > 1e-5


@pytest.mark.parametrize("dtype", ["float8", "float32", 16])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(ArgumentError, match="write bfloat16 or float16, or nothing"):
        autopar.compile(llama(), saved_dtype=dtype)  # pyright: ignore[reportArgumentType]


def test_a_recipe_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    lines = 'target = "train:build"', 'cluster = "2xH100"', 'saved_dtype = "bfloat16"'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_recipe(path).options.saved_dtype == "bfloat16"


@pytest.mark.processes
def test_two_processes() -> None:
    for seen in spawn("tests.runtime.draws_workers.rounded", 2):
        assert isinstance(seen, dict)
        assert seen["loss"] <= 2e-5 < 1e-4 < seen["grad"] <= 2e-2
