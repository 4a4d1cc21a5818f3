"""Every model of the zoo computes what eager computes, on every mesh, whatever the plan."""

from __future__ import annotations

import pytest
import torch

from autopar.codegen import generate
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.runtime.lockstep import train_step
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.codegen.test_random_plans import difference
from tests.planned import on_h100, plan_for
from tests.zoo import ZOO
from tests.zoo.cases import ZooCase, evaluated, trained

MESHES = [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)]
SEEDS = 5
TOLERANCE = 1e-9


def assert_equal_to_eager(found: ZooCase, plan: Plan, on: Mesh) -> None:
    """Outputs, new buffers and gradients of all ranks are eager's."""
    program = generate(found.traced.gm, found.traced.graph, plan)
    step = train_step(
        program, on, found.traced.graph, plan.structure, found.tensors, tolerance=TOLERANCE
    )
    assert step.outputs.keys() == found.outputs.keys()
    assert step.gradients.keys() == found.gradients.keys()
    pairs = {key: (value, found.outputs[key]) for key, value in step.outputs.items()}
    pairs |= {key: (value, found.gradients[key]) for key, value in step.gradients.items()}
    errors = {key: difference(*map(torch.Tensor.double, pair)) for key, pair in pairs.items()}
    assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_any_plan(name: str, sizes: tuple[int, ...], seed: int) -> None:
    found, on = trained(name), mesh(*sizes)
    assert_equal_to_eager(found, random_plan(found.traced.graph, on, seed), on)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_the_plan_chosen(name: str, sizes: tuple[int, ...]) -> None:
    found, text = trained(name), "x".join(map(str, sizes))
    assert_equal_to_eager(found, plan_for(found.traced.graph, text), on_h100(text)[1])


@pytest.mark.parametrize("name", ZOO)
def test_inference(name: str) -> None:
    found, on = evaluated(name), mesh(2, 2)
    assert_equal_to_eager(found, random_plan(found.traced.graph, on, 0), on)
