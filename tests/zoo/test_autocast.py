"""Models called under autocast: the casts are in the graph, sharded like everything else."""

from __future__ import annotations

import pytest
import torch

from autopar.codegen import generate
from autopar.runtime.lockstep import train_step
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.zoo import ZOO
from tests.zoo.cases import make_case

TOLERANCE = 2**-4
"""A few roundings of 2**-9 each, in sums of either sign."""


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_autocast_to_bfloat16_is_eager_s(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = make_case(model, inputs, exact=False)
    graph, on = found.traced.graph, mesh(2, 2)
    products = [n for n in graph.nodes if n.op in ("aten.mm.default", "aten.convolution.default")]
    assert products
    assert all(n.outputs[0].dtype == "bfloat16" for n in products)
    plan = random_plan(graph, on, 0)
    program = generate(found.traced.gm, graph, plan)
    step = train_step(program, on, graph, plan.structure, found.tensors, tolerance=TOLERANCE)
    largest = max(x.abs().max() for x in found.gradients.values())
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        actual = step.gradients[parameter]
        assert actual.dtype == expected.dtype == torch.float32
        assert (actual - expected).abs().max() <= TOLERANCE * largest, parameter
