"""Models called under autocast: the casts are in the graph, sharded like everything else."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.simulator.spmd import train_step
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import program_of
from tests.zoo import ZOO
from tests.zoo.cases import make_case


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
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
    program = program_of(found.traced, plan.structure.only, graph)
    step = train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=2**-4)
    exact, _ = ZOO[name]()
    held = {n.partition(":")[2]: x for n, x in found.tensors.items() if _held(n)}
    missing, unknown = exact.load_state_dict(held, strict=False)
    assert set(missing) <= found.traced.tied.keys()
    assert not [name for name in unknown if f"param:{name}" in found.tensors]
    result = exact(**inputs)
    result["loss"].backward()
    parameters = dict(exact.named_parameters())
    assert all(x.dtype == torch.float32 for x in step.gradients.values())
    ours, eager_s = (
        sum((x - parameters[n].grad).square().sum() for n, x in gradients.items())
        for gradients in (step.gradients, found.gradients)
    )
    # As far from float32 as eager under autocast is: only the order of roundings differs.
    assert ours < 1.5**2 * eager_s


def _held(name: str) -> bool:
    return name.startswith(("param:", "buffer:"))
