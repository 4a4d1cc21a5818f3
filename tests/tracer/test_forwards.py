"""A forward computes what eager computes, or is refused by call, module and line, with what to
write: which computes what eager does then."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import SideEffectWarning, TraceError
from autopar.tracer import trace
from tests.runtime.collective_workers import Normed
from tests.tracer.forwards import REFUSED, Forward, Whole
from tests.tracer.forwards_that_work import TOLD, WORKS

_GENERATOR = torch.Generator().manual_seed(5)
BATCHES = [
    (torch.randn(4, 6, generator=_GENERATOR), torch.randint(16, (4, 6), generator=_GENERATOR))
    for _ in range(2)
]
REMEDIES = [name for name, case in REFUSED.items() if case.instead is not None]


def model(forward: Forward) -> Whole:
    torch.manual_seed(0)
    return Whole(forward)


def steps(model: nn.Module, given: Any = None) -> list[Tensor]:
    """Losses and gradients of a step per batch."""
    torch.manual_seed(1)
    found: list[Tensor] = []
    for x, ids in BATCHES:
        model.zero_grad()
        loss = model(x.clone(), ids.clone(), *(given(x, ids) if given is not None else ()))
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found += [loss.detach(), *(grad.clone() for grad in grads)]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_its_line_and_a_remedy(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises(TraceError) as refused:
        trace(model(case.forward), BATCHES[0])
    first, remedy = str(refused.value).split("\n")[0], str(refused.value).split("\n")[-1]
    # Where the model catches the error, the frames of its modules are not among those of the error.
    who = "the model" if name == "caught" else "module 'part'"
    assert first.startswith(f"cannot capture {who} at ")
    assert "tests/tracer/forwards.py:" in first
    assert case.op in first and case.remedy in remedy


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownOpWarning")
def test_the_remedy_computes_what_eager_computes(name: str) -> None:
    case = REFUSED[name]
    assert case.instead is not None
    found = steps(autopar.compile(model(case.instead)), case.given)
    torch.testing.assert_close(found, steps(model(case.forward)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownOpWarning")
def test_what_works_computes_what_eager_computes(name: str) -> None:
    found = steps(autopar.compile(model(WORKS[name])))
    torch.testing.assert_close(found, steps(model(WORKS[name])), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", TOLD)
def test_what_is_left_out_is_told(name: str) -> None:
    forward, told = TOLD[name]
    expected = steps(model(forward))
    with pytest.warns(SideEffectWarning, match=told):
        found = steps(autopar.compile(model(forward)))
    torch.testing.assert_close(found, expected)
    with pytest.raises(TraceError, match=told):
        trace(model(forward), BATCHES[0], strict=True)


def test_text_of_a_traced_tensor_says_that_it_has_no_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(SideEffectWarning):
        trace(model(TOLD["text"][0]), BATCHES[0])
    assert "a traced tensor of torch.float32 and shape [4, 6]" in capsys.readouterr().out


def test_a_hook_that_is_put_on_a_parameter_before_works() -> None:
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        plain = model(WORKS["hooks of activations"])
        plain.part.line.weight.register_hook(lambda grad: grad * 2)
        found.append(steps(autopar.compile(plain) if compiled else plain))
    torch.testing.assert_close(*found)


def test_a_hook_in_forward_guards_no_more_than_forward_reads() -> None:
    """To know that it is on no parameter the tables of all modules are looked at."""
    traced = trace(model(WORKS["hooks of activations"]), BATCHES[0])
    labels = {read.label for read in traced.reads}
    assert "weight of part.line" in labels
    assert not any(label.startswith(("_parameters", "_modules")) for label in labels)


def test_generators_are_as_before() -> None:
    models = [model(REFUSED[name].forward) for name in ("seed", "fork")]
    drawing = model(TOLD["chance"][0])
    drawn = random.getstate(), torch.get_rng_state(), random.random
    for seeding in models:
        with pytest.raises(TraceError):
            trace(seeding, BATCHES[0])
    with pytest.warns(SideEffectWarning):
        trace(drawing, BATCHES[0])
    assert random.getstate() == drawn[0] and random.random == drawn[2]
    assert torch.equal(torch.get_rng_state(), drawn[1])


class Energies(nn.Module):
    """An energy per row, whose graph the forces use up, and a feature beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            energy = self.line(z).tanh().sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), z)
        return energy, force, self.line(x)


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_whose_graph_is_used_up(graded: bool, training: bool) -> None:
    torch.manual_seed(0)
    eager, ours = Energies().train(training), Energies().train(training)
    ours.load_state_dict(eager.state_dict())
    ours = autopar.compile(ours)
    for x, _ in BATCHES:
        with torch.set_grad_enabled(graded):
            expected, found = eager(x), ours(x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.detach(), b.detach())
        assert found[2].requires_grad == graded
        for model, outputs in ((eager, expected), (ours, found)):
            with pytest.raises(RuntimeError):
                outputs[0].sum().backward()
            if graded:
                model.zero_grad()
                outputs[2].sum().backward()
    if graded:
        torch.testing.assert_close(ours.line.weight.grad, eager.line.weight.grad)


def test_outputs_whose_graph_is_used_up_are_verified() -> None:
    model, inputs = Energies().double(), (BATCHES[0][0].double(),)
    autopar.verify(autopar.plan(model, inputs, cluster="2xcpu", mesh="2"), model, inputs)


@pytest.mark.parametrize("name", ["forces", "penalty"])
def test_gradients_within_forward_on_several_ranks(name: str) -> None:
    part = model(WORKS[name]).double()
    inputs = (BATCHES[0][0].double(), BATCHES[0][1])
    for mesh in ("2x2", "4"):
        autopar.verify(autopar.plan(part, inputs, cluster="4xcpu", mesh=mesh), part, inputs)


def test_a_norm_over_all_ranks_is_one_over_the_batch() -> None:
    normed = Normed().double()
    inputs = (BATCHES[0][0].double(),)
    autopar.verify(autopar.plan(normed, inputs, cluster="2xcpu", mesh="2"), normed, inputs)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_averages_of_all_batches_are_eager_s_in_float64(kind: type[nn.Module]) -> None:
    eager, ours = Normed().double(), Normed().double()
    ours.load_state_dict(eager.state_dict())
    eager.norm = nn.BatchNorm1d(6, momentum=None).double()
    ours.norm = kind(6, momentum=None).double()
    compiled = autopar.compile(ours, backend="eager")
    for seed in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=1e-13)
    torch.testing.assert_close(ours.norm.running_var, eager.norm.running_var, rtol=0, atol=1e-14)
