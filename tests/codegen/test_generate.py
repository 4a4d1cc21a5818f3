"""The program around the numbers: what crosses, what is bound, what is refused."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch
from torch import fx

from autopar.codegen import Program, bind
from autopar.errors import PlanMismatchError, VerificationError
from autopar.ir.graph import Role
from autopar.ir.sharding import Sharding
from autopar.plans.plan import Plan
from autopar.plans.structure import Structure
from autopar.runtime.program.symbols import local_chunk, mirror, permute
from autopar.runtime.simulator import spmd
from autopar.runtime.simulator.shards import shard, unshard
from autopar.tracer import trace
from tests.codegen.meshes import mesh
from tests.codegen.models import Case, case
from tests.codegen.random_plans import as_plan, random_plan
from tests.layouts import program_of
from tests.redone import redecided


def with_structure(plan: Plan, **changes: object) -> Plan:
    return as_plan(redecided(plan.structure, **changes).only)


def called(gm: fx.GraphModule | None) -> list[fx.Node]:
    assert gm is not None
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def generated(found: Case, plan: Plan) -> Program:
    return program_of(found.traced, plan.structure.only)


def test_on_one_device_nothing_is_communicated() -> None:
    found = case("gpt2")
    program = generated(found, random_plan(found.traced.graph, mesh(), 0))
    for gm in (program.forward, program.backward):
        assert not [n for n in called(gm) if "c10d" in str(n.target) or n.target is local_chunk]


def test_what_crosses_is_named_alike_on_both_sides() -> None:
    found = case("gpt2")
    program = generated(found, random_plan(found.traced.graph, mesh(2), 1))
    saved = [name for name in program.forward_outputs if name.startswith("saved:")]
    assert sorted(saved) == sorted(n for n in program.backward_inputs if n.startswith("saved:"))
    assert len(set(saved)) == len(saved)
    assert program.backward_outputs == tuple(
        f"grad:{n.target}" for n in found.traced.graph.with_role(Role.GRAD)
    )


def test_same_plan_same_code() -> None:
    found = case("gpt2")
    codes = [
        generated(found, random_plan(found.traced.graph, mesh(2, 2), 5)).forward.code
        for _ in range(2)
    ]
    assert codes[0] == codes[1]


def test_forward_only_without_gradients() -> None:
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    model.eval()
    x = torch.randn(4, 4)
    with torch.no_grad():
        traced = trace(model, (x,), {})
    plan = random_plan(traced.graph, mesh(2), 0)
    program = program_of(traced, plan.structure.only)
    assert program.backward is None
    assert program.backward_inputs == program.backward_outputs == ()
    tensors = {f"param:{n}": p for n, p in model.named_parameters()} | {"input:0": x}
    result = spmd.train_step(program, mesh(2), traced.graph, plan.structure.only, tensors)
    (value,) = result.outputs.values()
    torch.testing.assert_close(value, model(x))


def test_values_take_tangents_and_buffers_are_updated() -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return y - self.mean

    torch.manual_seed(0)
    model, x = Running(), torch.randn(4, 8, dtype=torch.float64)
    traced = trace(model, (x,), {})
    tensors = {"param:weight": model.weight.detach(), "buffer:mean": model.mean.clone()}
    tangent = torch.randn(4, 8, dtype=torch.float64)
    out = model(x)
    out.backward(tangent)
    assert model.weight.grad is not None
    for seed in range(4):
        plan = random_plan(traced.graph, mesh(2, 2), seed)
        program = program_of(traced, plan.structure.only)
        step = spmd.train_step(
            program, mesh(2, 2), traced.graph, plan.structure.only, tensors | {"input:0": x},
            {0: tangent}, tolerance=1e-12,
        )  # fmt: skip
        torch.testing.assert_close(step.outputs["value:0"], out)
        torch.testing.assert_close(step.outputs["mutation:mean"], model.mean)
        torch.testing.assert_close(step.gradients["weight"], model.weight.grad)


def test_bind_leaves_no_symbol_and_the_program_as_it_was() -> None:
    found, on = case("llama"), mesh(2, 4)
    plan = random_plan(found.traced.graph, on, 3)
    program = generated(found, plan)
    before = program.forward.code
    groups = {"ax0": "seven", "ax1": "eight"}
    starts: set[int] = set()
    for rank in range(8):
        bound = bind(program, groups, plan.structure.only.mesh, on.coordinate(rank))
        for symbolic, gm in (
            (program.forward, bound.forward),
            (program.backward, bound.backward),
        ):
            for old, new in zip(called(symbolic), called(gm), strict=True):
                if old.target is local_chunk:
                    _, dim, length, axis = old.args
                    index = on.coordinate(rank)[int(axis[-1])]
                    assert new.target is torch.ops.aten.slice.Tensor
                    assert new.args[1:] == (dim, index * length, (index + 1) * length)
                    starts.add(index)
                elif old.target in (permute, mirror):
                    assert new.target is torch.ops._c10d_functional.all_to_all_single.default
                    assert new.args[-1] == groups[old.args[-1]]
                elif old.args and old.args[-1] in groups:
                    assert new.args[-1] == groups[old.args[-1]]
                    assert new.target is old.target
            assert "ax0" not in gm.code
    assert starts == {0, 1, 2, 3}
    assert program.forward.code == before
    with pytest.raises(PlanMismatchError, match="no process group for mesh axis 'ax1'"):
        bind(program, {"ax0": "seven"}, plan.structure.only.mesh, (0, 0))


def test_a_route_that_misses_a_state_is_refused() -> None:
    found = case("gpt2")
    plan = random_plan(found.traced.graph, mesh(2), 0)
    key = next(iter(plan.structure.only.routes))
    routes = {k: v for k, v in plan.structure.only.routes.items() if k != key}
    with pytest.raises(PlanMismatchError, match=re.escape(key)):
        generated(found, with_structure(plan, routes=routes))


def test_a_route_in_two_strides_is_refused() -> None:
    found = case("mlp")
    plan = random_plan(found.traced.graph, mesh(2, 2), 0)
    params = dict(plan.structure.params)
    weight = msgspec.structs.replace(
        params["up.weight"], storage="[S(0), S(1)]", for_backward="[S(0), S(1)]"
    )
    routes = dict(plan.structure.only.routes)
    routes["param:up.weight@forward"] = ("[S(0), S(1)] -> [R, R]",)
    ops = {k: v if "mm" not in k else "-,-" for k, v in plan.structure.only.ops.items()}
    with pytest.raises(PlanMismatchError, match="is not one collective"):
        generated(
            found,
            with_structure(plan, params=params | {"up.weight": weight}, routes=routes, ops=ops),
        )


def test_a_missing_decision_is_refused() -> None:
    found = case("mlp")
    plan = random_plan(found.traced.graph, mesh(2), 0)
    key = next(k for k in plan.structure.only.ops if "mm" in k)
    ops = {k: v for k, v in plan.structure.only.ops.items() if k != key}
    with pytest.raises(PlanMismatchError, match=re.escape(key)):
        generated(found, with_structure(plan, ops=ops))


def test_shards_come_back_together_and_differences_are_found() -> None:
    found, on = case("llama"), mesh(2, 2)
    graph = found.traced.graph
    node = next(n for n in graph.with_role(Role.PARAM) if n.target.endswith("q_proj.weight"))
    whole = found.tensors[f"param:{node.target}"]
    for text in ("[S(0), S(0)]", "[S(1), R]", "[R, S(0)]", "[R, R]", "[S(0), S(1)]"):
        sharding = Sharding.parse(text)
        arguments = node.outputs[0], graph.atoms, sharding, on
        pieces = [shard(whole, *arguments, on.coordinate(rank)) for rank in range(4)]
        assert torch.equal(unshard(pieces, *arguments), whole)
    pieces = [whole.clone() for _ in range(4)]
    pieces[2][0, 0] += 1e-3
    replicated = Sharding.replicated(2)
    with pytest.raises(VerificationError, match="differs between ranks"):
        unshard(pieces, node.outputs[0], graph.atoms, replicated, on, tolerance=1e-5)
    unshard(pieces, node.outputs[0], graph.atoms, replicated, on, tolerance=1e-1)


def test_detached_outputs_come_back_whole() -> None:
    found = case("shapes")
    for seed in range(4):
        plan = random_plan(found.traced.graph, mesh(2, 2), seed)
        program = generated(found, plan)
        assert sorted(program.detached_shardings) == [1, 2]
        structure: Structure = plan.structure
        step = spmd.train_step(
            program, mesh(2, 2), found.traced.graph, structure.only, found.tensors, tolerance=1e-12
        )
        for position, expected in found.outputs.items():
            torch.testing.assert_close(step.outputs[f"detached:{position}"], expected)
