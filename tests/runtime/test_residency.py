"""A script trains as ever while its parameters live in the host's memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.errors import ArgumentError, PlanMismatchError
from autopar.ir.fingerprint import fingerprint
from autopar.ir.input_sharding import describe_inputs
from autopar.runtime.dtensor_private import dtensor_of
from autopar.runtime.module import optimizers
from autopar.runtime.program import binding, microbatch_run
from autopar.tracer import trace
from autopar.tracer.torch_private import FakeTensorMode
from tests.codegen.test_offload import ROWS, WIDTH, Stack, in_blocks
from tests.codegen.test_residency import planned
from tests.redone import redecided
from tests.runtime.microbatch_workers import batch, trained
from tests.runtime.spawn import spawn
from tests.runtime.test_microbatches import TOLERANCE, check, with_dropout
from tests.runtime.workers import distance, llama


@pytest.mark.breadth(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ten_steps_of_a_script(microbatches: int) -> None:
    """With another loss, batch and mode in between, and random numbers."""
    seen = trained(with_dropout(), residency="cpu", microbatches=microbatches)
    check(seen)


def hosted(compiled: autopar.CompiledModule) -> list[int]:
    """How many parameters live on the host, in each plan."""
    plans = [plan.structure.params.values() for plan in compiled.plans]
    return [sum(param.residency == "cpu" for param in params) for params in plans]


def test_all_programs_find_parameters_where_they_are() -> None:
    compiled = autopar.compile(llama(), memory={"residency": "cpu"})
    with torch.no_grad():
        compiled(**batch(0, 8))
    compiled(**batch(0, 8)).loss.backward()
    compiled(**batch(0, 6)).logits.mean().backward()
    total = len([*compiled.parameters()])
    assert hosted(compiled) == [total] * len(compiled.plans)
    assert len(compiled.plans) >= 2


def test_what_a_plan_has_on_the_host_stays_there() -> None:
    """In programs for other batches too, where a class of parameters is divided."""
    first = autopar.compile(llama())
    first(**batch(0, 8))
    structure = first.plans[-1].structure
    params = {
        name: replace(param, residency="cpu") if "layers.0" in name else param
        for name, param in structure.params.items()
    }
    plan = replace(first.plans[-1], structure=redecided(structure, params=params))
    plain = llama()
    compiled = autopar.compile(copy.deepcopy(plain), plan=plan)
    for size in (8, 6):
        for model in (compiled, plain):
            model.zero_grad()
            model(**batch(0, size)).loss.backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert distance(p.grad, q.grad) <= TOLERANCE
    kept = sum("layers.0" in name for name in params)
    assert hosted(compiled) == [kept, kept]


class Shown(nn.Module):
    """Returns, or changes, a parameter if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, how: str = "") -> tuple[Tensor, ...]:
        if how == "changed":
            with torch.no_grad():
                self.scale.mul_(0.5)
        loss = (self.linear(x) * self.scale).square().mean()
        return (loss, self.scale) if how == "returned" else (loss,)


@pytest.mark.parametrize("how", ["returned", "changed"])
def test_a_later_call_that_needs_it_on_the_device_is_an_error(how: str) -> None:
    compiled, x = autopar.compile(Shown(), memory={"residency": "cpu"}), torch.randn(2, 4)
    compiled(x)
    with pytest.raises(PlanMismatchError, match="parameter scale lives in the host's memory, but"):
        compiled(x, how)
    compiled = autopar.compile(Shown(), memory={"residency": "cpu"})
    compiled(x, how)
    compiled(x)[0].backward()
    assert hosted(compiled) == [2, 2]


def test_calls_end_when_parameters_have_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may change them then, with or without a backward."""
    waited: list[torch.device] = []
    monkeypatch.setattr(binding, "wait_for_loads", waited.append)
    for residency, count in (("cpu", 3), ("cuda", 0)):
        waited.clear()
        compiled = autopar.compile(llama(), memory={"residency": residency})
        with torch.no_grad():
            compiled(**batch(0, 8))
        compiled(**batch(0, 8)).loss.backward()
        assert len(waited) == count


def test_gradients_on_both_sides_are_scaled_where_they_are() -> None:
    with FakeTensorMode():
        loss = torch.ones((), device="cuda:0")
        given = [torch.ones(2), torch.ones(2, device="cuda:0")]
        found = microbatch_run._scaled(list(given), loss)
    assert [grad.device for grad in found] == [grad.device for grad in given]


def placed() -> list[str]:
    """The devices of an optimizer's states, where parameters are on the CPU, and the mesh is not:
    another kind of device stands in for GPUs."""
    mesh = init_device_mesh("cpu", (2,))
    mesh._device_type = "meta"
    whole = torch.empty(8, 4)
    param = nn.Parameter(dtensor_of(torch.ones(4, 4), whole, mesh, [Shard(0)]))
    optimizers.mark(param)
    optimizer = torch.optim.AdamW([param])
    for _ in range(2):
        param.grad = dtensor_of(torch.ones(4, 4), whole, mesh, [Shard(0)])
        optimizer.step()
    states = optimizer.state[param].values()
    return [str((x.to_local() if isinstance(x, DTensor) else x).device) for x in states]


@pytest.mark.processes
def test_states_are_where_their_parameter_is() -> None:
    for seen in spawn("tests.runtime.test_residency.placed", 2):
        assert seen == ["cpu", "cpu", "cpu"]


def two() -> dict[str, Any]:
    return trained(llama(), residency="cpu", strategy="fsdp")


@pytest.mark.nightly
@pytest.mark.processes
def test_two_processes_in_shards() -> None:
    for seen in spawn("tests.runtime.test_residency.two", 2):
        assert isinstance(seen, dict)
        check(seen)


def four() -> list[float]:
    """Steps under plans drawn at random, on 2 x 2 devices: how far from eager."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    far: list[float] = []
    for seed, part in ((4, 0.5), (8, 1.0)):
        torch.manual_seed(seed)
        model = Stack().train()
        plain = copy.deepcopy(model)
        graph = trace(copy.deepcopy(model), (), {"x": x}).graph
        plan = planned(graph, in_blocks(2, 2), seed, part, microbatches=1)
        structure = redecided(
            plan.structure, inputs=describe_inputs(graph), fingerprint=fingerprint(graph)
        )
        assert structure.only.recompute and structure.only.offloaded
        assert any(param.residency == "cpu" for param in structure.params.values())
        compiled = autopar.compile(model, plan=replace(plan, structure=structure))
        both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (compiled, plain)]
        for step in range(3):
            losses: list[Tensor] = []
            for each in (compiled, plain):
                torch.manual_seed(seed + step)
                losses.append(each(x=x))
            for loss in losses:
                loss.backward()
            far.append(distance(*losses))
            pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
            apart = [(p.grad.full_tensor() - q.grad).abs().max() for p, q in pairs]
            # A bias in front of a batch norm has a gradient of rounding errors alone.
            largest = max(q.grad.abs().max() for q in plain.parameters())
            far += [float(one / largest) for one in apart]
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        buffers = zip(compiled.buffers(), plain.buffers(), strict=True)
        far += [distance(a.double(), b.double()) for a, b in buffers]
    return far


@pytest.mark.nightly
@pytest.mark.processes
def test_four_processes_with_all_that_saves_memory() -> None:
    """Dropout and batch norm among what is kept, recomputed, offloaded and on the host."""
    for far in spawn("tests.runtime.test_residency.four", 4):
        assert isinstance(far, list)
        assert max(far) <= TOLERANCE


def test_it_is_read_before_anything_is_done() -> None:
    with pytest.raises(ArgumentError, match="residency='host': write one of cuda, cpu, auto"):
        autopar.compile(llama(), memory={"residency": "host"})
