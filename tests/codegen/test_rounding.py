"""What is saved in fewer bits, if that is asked for: what it is, and what becomes of gradients."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import OUTPUT_ROLES, Graph, Node, Phase, Role
from autopar.ir.offloading import offloadable
from autopar.ir.own_ops import RESTORE, ROUND
from autopar.ir.passes.recompute import as_written
from autopar.ir.passes.rounding import rounded_key
from autopar.ir.uses import groups, is_saved, root_of
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.plan import Plan
from autopar.runtime.simulator.spmd import StepResult, train_step
from tests.codegen.meshes import mesh
from tests.codegen.models import Case, case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_draws import drawing
from tests.codegen.test_offload import in_blocks
from tests.codegen.test_random_plans import TOLERANCE, difference
from tests.codegen.test_recompute import candidates
from tests.layouts import program_of
from tests.redone import redecided

ROUNDED = {"bfloat16": 2e-2, "float16": 3e-3}
"""How far gradients may be off: a few times the last bit of the dtype."""


def planned(
    graph: Graph,
    sizes: Sequence[int],
    dtype: str,
    seed: int = 0,
    microbatches: int = 1,
    part: float = 0.0,
) -> Plan:
    """A random plan, with a part of what can be recomputed, or offloaded."""
    draw, on = random.Random(seed), in_blocks(*sizes) if sizes else mesh()
    again = [key for key in candidates(graph) if draw.random() < part]
    step = step_graph(graph, StepForm(microbatches, saved_dtype=dtype, recompute=frozenset(again)))
    step.check()
    away = [key for key in offloadable(step, on) if microbatches == 1 and draw.random() < part]
    plan = random_plan(step, on, seed, microbatches=microbatches)
    structure = redecided(
        plan.structure, recompute=tuple(again), offloaded=tuple(away), reload_pace=1 << 16,
        saved_dtype=dtype,
    )  # fmt: skip
    return msgspec.structs.replace(plan, structure=structure)


def ran(found: Case, plan: Plan, tolerance: float) -> StepResult:
    graph, structure = found.traced.graph, plan.structure
    program = program_of(found.traced, plan.structure.only, graph)
    torch.manual_seed(1)
    return train_step(
        program, structure.only.mesh, graph, structure.only, found.tensors, tolerance=tolerance
    )


@pytest.mark.breadth(5)
@pytest.mark.parametrize(("seed", "part", "microbatches"), [(0, 0.0, 1), (1, 0.4, 1), (2, 0.3, 2)])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_are_within_the_rounding(
    name: str, dtype: str, sizes: Sequence[int], seed: int, part: float, microbatches: int
) -> None:
    """And the loss is what it was: forward computes with what was not rounded."""
    found, allowed = case(name), ROUNDED[dtype]
    step = ran(found, planned(found.traced.graph, sizes, dtype, seed, microbatches, part), allowed)
    assert difference(step.outputs["loss:0"], found.loss) <= TOLERANCE[name]
    assert step.gradients.keys() == found.gradients.keys()
    far = {n: difference(g, found.gradients[n]) for n, g in step.gradients.items()}
    assert TOLERANCE[name] < max(far.values()) <= allowed


def test_forward_is_what_it_was_to_the_last_bit() -> None:
    found = case("llama")
    plain, rounding = (ran(found, planned(found.traced.graph, (), d), 0.0) for d in ("", "float16"))
    for name, tensor in plain.outputs.items():
        assert torch.equal(rounding.outputs[name], tensor), name


def test_nothing_changes_unless_it_is_asked_for() -> None:
    graph = case("gpt2").traced.graph
    plan = planned(graph, (2,), "")
    assert step_graph(graph, StepForm(saved_dtype="")) is graph
    assert b"saved_dtype" not in plan.to_bytes()
    asked = planned(graph, (2,), "bfloat16").to_bytes()
    assert b'"saved_dtype": "bfloat16"' in asked and Plan.from_bytes(asked).to_bytes() == asked


def saved_for_backward(graph: Graph, dtype: str) -> list[Node]:
    """The ops whose results backward finds."""
    step = step_graph(graph, StepForm(saved_dtype=dtype))
    return [step.nodes[g.root.node] for g in groups(step) if is_saved(step, g)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_rounded(name: str) -> None:
    """Activations, and neither statistics, masks, tables, parameters nor what leaves the step."""
    graph = case(name).traced.graph
    saved = saved_for_backward(graph, "bfloat16")
    wide = {node.key for node in saved if node.op != ROUND}
    for word in ("rsqrt", "cos", "sin", "tanh", "layer_norm", "_log_softmax", "nll_loss"):
        assert not any(f":round.{word}." in node.key for node in saved)
    of = {rounded_key(node.key) for node in saved if node.op == ROUND}
    activations = {"gpt2": ("mlp.act:forward:mul", "act:forward:add"), "llama": ("silu", "up_proj")}
    assert all(any(word in str(key) for key in of) for word in activations[name])
    assert not any("sdpa.0" in str(key) for key in of)
    assert any("sdpa.0" in key for key in wide)
    step = step_graph(graph, StepForm(saved_dtype="bfloat16"))
    leaving = {root_of(step, n.inputs[0])[0].node for n in step.with_role(*OUTPUT_ROLES)}
    for node in step.nodes:
        if node.op == ROUND:
            assert node.phase is Phase.FORWARD and node.inputs[0].node not in leaving
            assert step.nodes[root_of(step, node.inputs[0])[0].node].role is Role.OP
        if node.op == RESTORE:
            assert node.phase is Phase.BACKWARD and node.outputs[0].dtype == "float32"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_rounded_is_the_same_whatever_is_made_again(name: str) -> None:
    """What attention reads in backward, or may be computed of again, is nowhere among it."""
    graph = case(name).traced.graph

    def rounded(again: Collection[str] | None) -> set[str]:
        wanted = None if again is None else frozenset(again)
        step = step_graph(graph, StepForm(saved_dtype="bfloat16", recompute=wanted))
        return {node.key for node in step.nodes if node.op == ROUND}

    known = rounded(())
    attention = {"gpt2": ("attn", "ln_1"), "llama": ("self_attn", "input_layernorm")}[name]
    for again in (None, candidates(graph), as_written(graph)):
        assert rounded(again) <= known
    for key in known:
        assert not any(f"{word}:" in key for word in attention), key


def test_masks_and_noise_stay_as_they_are() -> None:
    """They are in float64 there, which is not rounded at all."""
    graph = drawing().traced.graph
    assert step_graph(graph, StepForm(saved_dtype="bfloat16")) is graph


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_less_is_saved(name: str) -> None:
    """Nearly half of what is behind the first layer of each feed-forward network."""
    graph = case(name).traced.graph

    def num_bytes(dtype: str) -> int:
        step = step_graph(graph, StepForm(saved_dtype=dtype))
        saved = (step.type_of(g.root) for g in groups(step) if is_saved(step, g))
        return sum(tensor.num_bytes for tensor in saved)

    assert num_bytes("bfloat16") <= 0.81 * num_bytes("")


class Large(nn.Module):
    """Computes with numbers that float16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (1e5 * self.linear(x)).tanh().mul(1e6).square().mean().sqrt()


def test_what_float16_does_not_have_gives_no_infinity() -> None:
    torch.manual_seed(0)
    found = make_case(Large(), {"x": torch.randn(4, 8)})
    step = ran(found, planned(found.traced.graph, (), "float16"), 0.0)
    for gradient in step.gradients.values():
        assert gradient.isfinite().all()
