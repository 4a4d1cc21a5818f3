"""The comparison of a model under a plan with eager: outputs, new buffers and gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.plans.plan import Plan
from autopar.runtime.simulator.spmd import StepResult, train_step
from tests.codegen.events import check_order, watched
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import program_of
from tests.zoo.cases import ZooCase
from tests.zoo.chosen import chosen_plan

MESHES = [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)]
TOLERANCE = 1e-9


def assert_equal_to_eager(found: ZooCase, plan: Plan, on: Mesh) -> None:
    """Outputs, new buffers and gradients of all ranks are eager's, and the program is its schedule,
    event by event."""
    with watched() as written:
        program = program_of(found.traced, plan.structure.only)
    check_order(written, program, on.names)
    step = train_step(
        program, on, found.traced.graph, plan.structure.only, found.tensors, tolerance=TOLERANCE
    )
    assert_step_is_eager(found, step)


def assert_step_is_eager(found: ZooCase, step: StepResult) -> None:
    """Outputs, new buffers and gradients are eager's."""
    assert step.outputs.keys() == found.outputs.keys()
    assert step.gradients.keys() == found.gradients.keys()
    pairs = {key: (value, found.outputs[key]) for key, value in step.outputs.items()}
    pairs |= {key: (value, found.gradients[key]) for key, value in step.gradients.items()}
    largest = max((x.abs().max().item() for x in found.gradients.values()), default=1.0)
    errors = {key: _error(*pair, largest) for key, pair in pairs.items()}
    assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}


def _error(actual: Tensor, expected: Tensor, largest: float) -> float:
    """The largest difference, relative to the largest magnitude; of a gradient that is 0 but for
    rounding (of a bias under a norm), to a thousandth of the largest one of the model."""
    assert actual.shape == expected.shape
    scale = max(expected.double().abs().max().item(), largest / 1000)
    return (actual.double() - expected.double()).abs().max().item() / scale


def check_any_plan(
    found: ZooCase,
    sizes: tuple[int, ...],
    seed: int,
    pins: Mapping[str, str] | None = None,
    microbatches: int = 1,
) -> Plan:
    """A random plan, but for the choices `pins`, computes what eager computes; the plan."""
    on = mesh(*sizes)
    plan = random_plan(found.traced.graph, on, seed, pins, microbatches)
    assert_equal_to_eager(found, plan, on)
    return plan


def check_plan_chosen(found: ZooCase, sizes: tuple[int, ...]) -> None:
    """The plan that is chosen shards work over every axis, and computes what eager computes."""
    plan, on = chosen_plan(found.traced.graph, sizes)
    options = [label.split(",") for label in plan.structure.only.ops.values()]
    assert all(any(axis != "-" for axis in column) for column in zip(*options, strict=True))
    assert_equal_to_eager(found, plan, on)
