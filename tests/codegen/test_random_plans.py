"""Random plans compute what eager computes: the proof of rules and rewriting together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from autopar.runtime.simulator.spmd import train_step
from tests.codegen.meshes import mesh
from tests.codegen.models import case
from tests.codegen.random_plans import random_plan
from tests.layouts import program_of

TOLERANCE = {"mlp": 1e-9, "shapes": 1e-9, "gpt2": 1e-5, "llama": 1e-5}


@pytest.mark.breadth(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(), (2,), (4,), (2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", TOLERANCE)
def test_equal_to_eager(name: str, sizes: Sequence[int], seed: int) -> None:
    found, on = case(name), mesh(*sizes)
    plan = random_plan(found.traced.graph, on, seed)
    program = program_of(found.traced, plan.structure.only)
    tolerance = TOLERANCE[name]
    step = train_step(
        program, on, found.traced.graph, plan.structure.only, found.tensors, tolerance=tolerance
    )
    loss = next(value for key, value in step.outputs.items() if key.startswith("loss:"))
    worst = {"loss": difference(loss, found.loss)}
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        worst[parameter] = difference(step.gradients[parameter], expected)
    wrong = {key: value for key, value in worst.items() if not value <= tolerance}
    assert not wrong


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() or 1.0
    return ((actual - expected).abs().max() / scale).item()
