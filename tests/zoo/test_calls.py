"""Inputs, outputs, states and dtypes of every sort, on shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Role
from autopar.runtime.simulator.spmd import train_step
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import program_of
from tests.zoo.calls import WIDTH, call, everything
from tests.zoo.cases import ZooCase, make_case
from tests.zoo.equality import check_any_plan, check_plan_chosen

ROWS = 8


def in_float64(*, train: bool) -> ZooCase:
    args, kwargs = call(ROWS)
    (x, more), target = args, kwargs["target"]
    shifts = {"shifts": [shift.double() for shift in more["shifts"]]}
    model = everything().double().train(train)
    return make_case(model, {**kwargs, "target": target.double()}, (x.double(), shifts))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("sizes", [(2,), (2, 4)], ids=str)
def test_every_sort_of_call(sizes: tuple[int, ...], train: bool) -> None:
    found = in_float64(train=train)
    assert set(found.gradients) == {"up.weight", "up.bias", "down.weight"}
    assert sorted(k.partition(":")[0] for k in found.outputs) == [
        "detached", "loss", "loss", "mutation",
    ]  # fmt: skip
    check_plan_chosen(found, sizes)
    for seed in range(5):
        check_any_plan(found, sizes, seed)


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        found = in_float64(train=False)
    assert not found.traced.graph.with_role(Role.GRAD)
    check_plan_chosen(found, (2, 2))


def test_a_model_in_bfloat16_is_as_near_to_float64_as_eager_is() -> None:
    args, kwargs = call(ROWS)
    (x, more), on = args, mesh(2, 2)
    shifts = {"shifts": [shift.bfloat16() for shift in more["shifts"]]}
    inputs = {**kwargs, "target": kwargs["target"].bfloat16()}
    found = make_case(everything().bfloat16(), inputs, (x.bfloat16(), shifts), exact=False)
    exact = in_float64(train=True).gradients
    graph = found.traced.graph
    for seed in range(3):
        plan = random_plan(graph, on, seed)
        program = program_of(found.traced, plan.structure.only, graph)
        step = train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=2**-4)
        for name, gradient in step.gradients.items():
            assert gradient.dtype == torch.bfloat16
            ours, eager_s = ((g - exact[name]).norm() for g in (gradient, found.gradients[name]))
            assert ours <= 2 * eager_s


class Spans(nn.Module):
    """Puts a parameter, or a number, where masks say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.span = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.up(x) * 2
        hidden[mask] = self.span
        hidden[hidden > 1] = 0
        return hidden.square().sum()


def test_what_a_mask_picks_is_assigned() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(ROWS, 4, WIDTH), "mask": torch.rand(ROWS, 4) > 0.5}
    found = make_case(Spans().double(), {**inputs, "x": inputs["x"].double()})
    assert found.gradients["span"].any()
    check_plan_chosen(found, (2, 2))
    for seed in range(3):
        check_any_plan(found, (2, 2), seed)
