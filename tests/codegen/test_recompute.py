"""What backward recomputes, whatever that is and however it is laid out, changes no gradient."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.own_ops import is_copy, is_optional, original_key
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.uses import groups, is_saved, root_key
from autopar.runtime.simulator.spmd import train_step
from tests.codegen.meshes import mesh
from tests.codegen.models import case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_random_plans import TOLERANCE, difference
from tests.layouts import program_of
from tests.redone import redecided

EVERYTHING = 1.0
BLOCKS = ("shapes", "gpt2", "llama")


def candidates(graph: Graph) -> list[str]:
    """What can be recomputed."""
    nodes = with_recompute(graph, None).nodes
    return sorted({original_key(node.key) for node in nodes if is_optional(node) and not node.view})


@pytest.mark.breadth(5)
@pytest.mark.parametrize(("seed", "part"), [(0, 0.3), (1, 0.6), (2, EVERYTHING)])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_equal_to_eager(name: str, sizes: Sequence[int], seed: int, part: float) -> None:
    found, on = case(name), mesh(*sizes)
    graph, draw = found.traced.graph, random.Random(seed)
    known = candidates(graph)
    keys = tuple(key for key in known if draw.random() < part) or tuple(known)
    step_graph = with_recompute(graph, keys)
    step_graph.check()
    assert any(is_copy(node) for node in step_graph.nodes)
    plan = random_plan(step_graph, on, seed)
    plan = msgspec.structs.replace(plan, structure=redecided(plan.structure, recompute=keys))
    program = program_of(found.traced, plan.structure.only, graph)
    tolerance = TOLERANCE[name]
    step = train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=tolerance)
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        assert difference(step.gradients[parameter], expected) <= tolerance, parameter


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_made_again_is_not_saved(name: str) -> None:
    graph = case(name).traced.graph
    for keys in ([key] for key in candidates(graph)):
        saved = [g for g in groups(with_recompute(graph, keys)) if is_saved(graph, g)]
        assert not {root_key(graph, group.root) for group in saved} & set(keys)


def test_blocks_hand_on_what_is_saved() -> None:
    graph = case("llama").traced.graph
    found = with_recompute(graph, None)
    handed = {n.key for n in graph.nodes if n.key.startswith("model.layers.*:forward:add.1")}
    assert handed and not handed & set(candidates(graph))
    for node in found.nodes:
        if is_optional(node) and not node.view:
            readers = [found.nodes[ref.node] for ref in node.inputs]
            assert all(r.phase is Phase.FORWARD or is_optional(r) for r in readers)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.a(x)).tanh() + self.norm.running_var).sin().square().mean()


def test_what_reads_a_buffer_that_changes_is_not_made_again() -> None:
    graph = make_case(Counted().train(), {"x": torch.randn(4, 8)}).traced.graph
    changed = {node.target for node in graph.with_role(Role.MUTATION)}
    buffers = {n.index for n in graph.with_role(Role.BUFFER) if n.target in changed}
    readers = {n.key for n in graph.nodes if buffers & {ref.node for ref in n.inputs}}
    assert readers and not readers & set(candidates(graph))
    assert any(":sin." in key for key in candidates(graph))
