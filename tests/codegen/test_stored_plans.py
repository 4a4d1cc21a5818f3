"""A plan that went through a file trains as the plan itself does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.plans.plan import Plan
from autopar.runtime.simulator.spmd import StepResult, train_step
from tests.codegen.models import case
from tests.layouts import program_of
from tests.planned import on_h100, plan_for


def trained(name: str, mesh: str, plan: Plan) -> StepResult:
    found = case(name)
    program = program_of(found.traced, plan.structure.only)
    on = on_h100(mesh)[1]
    return train_step(
        program, on, found.traced.graph, plan.structure.only, found.tensors, tolerance=1e-5
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


ANY_PLAN = given(
    name=st.sampled_from(["mlp", "gpt2", "llama"]), mesh=st.sampled_from(["4", "2x2", "2x4"])
)


@settings(max_examples=2)
@ANY_PLAN
def test_a_stored_plan_trains_identically(name: str, mesh: str, folder: Path) -> None:
    check_stored(name, mesh, folder)


@pytest.mark.nightly
@settings(max_examples=6)
@ANY_PLAN
def test_every_stored_plan_trains_identically(name: str, mesh: str, folder: Path) -> None:
    check_stored(name, mesh, folder)


def check_stored(name: str, mesh: str, folder: Path) -> None:
    plan = plan_for(case(name).traced.graph, mesh)
    plan.save(folder / "plan.json")
    loaded = Plan.load(folder / "plan.json")
    assert loaded == plan
    assert loaded.digest == plan.digest
    first, second = trained(name, mesh, plan), trained(name, mesh, loaded)
    assert first.outputs.keys() == second.outputs.keys()
    assert first.gradients.keys() == second.gradients.keys() != set()
    for key, value in {**first.outputs, **first.gradients}.items():
        assert torch.equal(value, {**second.outputs, **second.gradients}[key]), key
