"""Plans in microbatches that are chosen: equal to eager under every strategy, with what travels
once travelling once, and what was predicted when it is played."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import survey
from autopar.errors import InfeasibleError
from autopar.plans.estimates import StageEstimates
from autopar.plans.memory_refinement import Candidate
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.runtime.simulator.spmd import train_step
from autopar.solver.search import silent
from autopar.tracer import trace
from autopar.tracer.torch_private import weight_norm
from tests.codegen.meshes import mesh
from tests.codegen.models import case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_random_plans import TOLERANCE, difference
from tests.layouts import program_of
from tests.planned import as_planned, hostless


def chosen(
    name: str, cluster: str, mesh: str, strategy: str, count: int | str, limit: int | None = None
) -> Candidate:
    options = make_options(
        mesh=mesh,
        memory={"limit": limit},
        constraints={"strategy": strategy},
        backend="eager",
        microbatches=count,
    )
    return survey(
        make_graph_request(case(name).traced.graph, hostless(cluster), options), Trail(silent)
    ).only


def sent(estimates: StageEstimates, kind: str, phase: str) -> int:
    return sum(t.count for t in estimates.collectives if (t.kind, t.phase) == (kind, phase))


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("cluster", "mesh", "strategy"),
    [
        ("2xH100", "2", "ddp"),
        ("2xH100", "2", "fsdp"),
        ("4xH100", "4", "megatron"),
        ("2x2xH100", "2x2", "2d"),
        pytest.param("8xH100", "2x2x2", "3d", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_strategies_are_eager(name: str, cluster: str, mesh: str, strategy: str) -> None:
    found = case(name)
    best = chosen(name, cluster, mesh, strategy, 2)
    plan = as_planned(best.request, best.structure, best.estimates)
    plan = Plan.from_bytes(plan.to_bytes())
    program = program_of(found.traced, plan.structure.only)
    step = train_step(
        program, best.mesh, found.traced.graph, plan.structure.only, found.tensors, tolerance=1e-5
    )
    assert difference(step.outputs["loss:0"], found.loss) <= TOLERANCE[name]
    assert step.gradients.keys() == found.gradients.keys()
    worst = {n: difference(g, found.gradients[n]) for n, g in step.gradients.items()}
    assert max(worst.values()) <= TOLERANCE[name]
    assert abs(plan.estimates.step_ns / plan.estimates.stages[0].modelled_ns - 1) < 0.09


def test_gradients_travel_once_and_parameters_in_every_turn() -> None:
    one, two = (chosen("llama", "2xH100", "2", "fsdp", n).estimates for n in (1, 2))
    for kind, phase, times in (
        ("all_gather", "forward", 2),
        ("all_gather", "backward", 2),
        ("reduce_scatter", "backward", 1),
    ):
        assert sent(two, kind, phase) == times * sent(one, kind, phase) > 0
    assert 0 < two.memory.saved <= 0.51 * one.memory.saved
    assert two.memory.accumulated > 0 == one.memory.accumulated


class Tall(nn.Module):
    """Little to learn from a large batch: memory is all activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_as_many_as_it_takes_where_memory_binds() -> None:
    graph = trace(Tall(), (torch.randn(4096, 16),), {}).graph

    def best(count: int | str, limit: int | None = None) -> Candidate:
        options = make_options(
            mesh="1", optimizer="sgd", memory={"limit": limit}, backend="eager", microbatches=count
        )
        return survey(make_graph_request(graph, hostless("1xH100"), options), Trail(silent)).only

    assert best("auto").structure.microbatches == 1
    limit = best(8).estimates.memory.total
    with pytest.raises(InfeasibleError):
        best(1, limit)
    found = best("auto", limit)
    assert found.structure.microbatches > 1
    assert found.estimates.memory.total <= limit
    assert found.estimates.modelled_ns <= best(8, limit).estimates.modelled_ns


def test_no_more_of_them_is_shorter_than_one() -> None:
    cluster = parse_cluster("2xH100")
    options = make_options(mesh="2", backend="eager")
    wanted = make_graph_request(case("llama").traced.graph, cluster, options)
    request = survey(wanted, Trail(silent)).only.request
    times = [
        best_on(replace(request, microbatches=n), silent).solution.objective for n in (1, 2, 4)
    ]
    assert times == sorted(times)


class Judged(nn.Module):
    """A linear layer, and a loss of it."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.weight: Tensor
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.linear(x)
        if self.loss == "images":
            return functional.cross_entropy(scores.transpose(1, 2), target, ignore_index=1)
        scores, target = scores.flatten(0, 1), target.flatten()
        if self.loss == "weights":
            return functional.cross_entropy(scores, target, self.weight, ignore_index=2)
        if self.loss == "smooth":
            return functional.cross_entropy(scores, target, label_smoothing=0.1, ignore_index=0)
        if self.loss == "decay":
            decay = sum(p.square().sum() for p in self.parameters())
            return functional.cross_entropy(scores, target) + 0.1 * decay
        if self.loss == "sum":
            return functional.cross_entropy(scores, target, reduction="sum")
        if self.loss == "masked":
            each = functional.cross_entropy(scores, target, reduction="none")
            return (each * (target > 1)).sum() / (target > 1).sum()
        if self.loss == "squares":
            return functional.mse_loss(scores, functional.one_hot(target, 5).to(scores.dtype))
        flags = functional.one_hot(target, 5).to(scores.dtype)
        return functional.binary_cross_entropy_with_logits(scores, flags)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("sizes", [(), (2,)], ids=str)
@pytest.mark.parametrize(
    "loss", ["weights", "smooth", "decay", "sum", "masked", "images", "squares", "binary"]
)
def test_losses_stay_those_of_the_whole_batch(loss: str, sizes: tuple[int, ...]) -> None:
    model = Judged(loss).double()
    x = torch.randn(8, 3, 6, dtype=torch.float64)
    target = torch.randint(0, 5, (8, 3))
    target[5:] = 2
    expected = model(x, target)
    expected.backward()
    found, on = trace(model, (x, target), {}), mesh(*sizes)
    plan = random_plan(found.graph, on, 0, microbatches=4)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {"buffer:weight": model.weight, "input:0": x, "input:1": target}
    program = program_of(found, plan.structure.only)
    step = train_step(program, on, found.graph, plan.structure.only, tensors, tolerance=1e-9)
    assert difference(step.outputs["loss:0"], expected.detach()) <= TOLERANCE["mlp"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert difference(step.gradients[name], parameter.grad) <= TOLERANCE["mlp"]


class Shared(nn.Module):
    """Two parameters whose gradients are one tensor, and one that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.u = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.w + self.v + self.u.view(4, 4))).square().sum()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("sizes", [(), (2,)], ids=str)
def test_gradients_that_are_one_tensor_leave_as_copies(
    sizes: tuple[int, ...], microbatches: int
) -> None:
    model, x = Shared(), torch.randn(8, 4)
    found, on = trace(model, (x,), {}), mesh(*sizes)
    plan = random_plan(found.graph, on, 0, microbatches=microbatches)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    program = program_of(found, plan.structure.only)
    assert program.backward is not None
    left = program.backward.graph.output_node().args[0]
    assert isinstance(left, tuple)
    copies = [getattr(node, "target", None) == torch.ops.aten.clone.default for node in left]
    # The sum over turns of a view has memory of its own.
    assert sum(copies) == (2 if microbatches == 1 else 1)
    step = train_step(program, on, found.graph, plan.structure.only, tensors | {"input:0": x})
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)


class Composed(nn.Module):
    """Weights that are products of parameters, in both places, in a batch and of several."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 4))
        self.b, self.c = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3, 4, 4))
        self.g = nn.Parameter(torch.rand(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.w + self.b @ self.a + torch.bmm(self.c, self.c).sum(0)
        weight = weight_norm(weight, self.g, 0) @ self.w.tanh()
        return functional.linear(x, weight).square().mean()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
def test_weights_that_are_made_of_parameters(sizes: tuple[int, ...], microbatches: int) -> None:
    """Their gradients are sums over turns, and linear in those are the parameters'."""
    model, x = Composed().double(), torch.randn(8, 4, dtype=torch.float64)
    found, on = trace(model, (x,), {}), mesh(*sizes)
    plan = random_plan(found.graph, on, 0, microbatches=microbatches)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    program = program_of(found, plan.structure.only)
    step = train_step(
        program, on, found.graph, plan.structure.only, tensors | {"input:0": x}, tolerance=1e-9
    )
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
