"""`verify` on models that do what models do: keep functions, cast, return what is no float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile import ModelCall, rewritten
from autopar.driver import verify
from autopar.driver.verify import compare_program
from autopar.errors import VerificationError
from autopar.runtime.simulator.comparison import Report
from autopar.runtime.simulator.spmd import StepResult
from autopar.tracer import trace
from tests.planned import plan_for

X = (torch.linspace(-1, 1, 32).reshape(8, 4),)


def check(model: nn.Module, inputs: tuple[Any, ...] = X, **options: Any) -> Report:
    return autopar.verify(autopar.plan(model, inputs, cluster="2xcpu"), model, inputs, **options)


class Lambda(nn.Module):
    """minGPT's: a function over modules, which a copy of the model would not have."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        parts = self.parts
        self.mlp: Callable[[Tensor], Tensor] = lambda x: parts["down"](parts["up"](x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).square().mean()


class NonLeaf(nn.Module):
    """Keeps the result of an op, which has a history and cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.state = torch.zeros(4, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        self.state = y.sum(0)
        return y.square().mean()


@pytest.mark.filterwarnings("ignore:forward leaves tensors in state of the model")
def test_functions_over_modules_and_tensors_with_a_history() -> None:
    for model in (Lambda(), NonLeaf()):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        params, attributes = list(model.parameters()), dict(vars(model))
        params[0].grad = held = torch.ones_like(params[0])
        report = check(model)
        assert sum("gradient" in d.name for d in report.differences) == len(params)
        assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())
        assert list(model.parameters()) == params
        assert vars(model) == attributes
        assert params[0].grad is held
        assert all(param.grad is None for param in params[1:])


class Returning(nn.Module):
    """A loss beside numbers, truth values and an object that is no container."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.line(x)
        found = {"loss": y.square().mean(), "best": y.argmax(-1), "high": y > 0, "size": y.numel()}
        if not torch.compiler.is_compiling():
            found["cache"] = object()
        return found


def test_outputs_of_any_dtype_and_objects_that_only_eager_returns() -> None:
    model = Returning()
    names = {d.name for d in check(model).differences}
    assert {"output 0 (loss)", "output 1", "output 2"} <= names


class Cancelling(nn.Module):
    """What is left of a difference is rounding; a running mean of it is about 1e-9."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.line = nn.Linear(4, 64, bias=False)
        self.dtype = dtype
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        y = y if self.dtype is None else y.to(self.dtype)
        rest = y - y.mean(0)
        self.mean.copy_(rest.detach().mean(0))
        return rest.square().mean()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_rounding_is_told_in_float64(own: torch.dtype, dtype: torch.dtype | None) -> None:
    """Also of a model that casts to float32 whatever it is in, or lower."""
    torch.manual_seed(0)
    model, x = Cancelling(dtype).to(own), torch.randn(64, 4, dtype=own)
    report = compare(model, x, {r"line:forward:mm\.0": "k"})
    report.check()
    if dtype is not torch.bfloat16:
        (mean,) = (d for d in report.differences if d.name == "buffer mean")
        assert mean.relative > report.tolerance and mean.exact is not None


class Stateful(nn.Module):
    """A gradient and a buffer to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        self.seen += y.detach().sum(0)
        return y.square().mean()


@pytest.mark.parametrize("lost", ["gradient of line.bias", "buffer seen", "output 0 (loss)"])
def test_what_the_compiler_loses_is_named(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.train_step

    def losing(*args: Any, **kwargs: Any) -> StepResult:
        found = right(*args, **kwargs)
        found.gradients.pop(lost.removeprefix("gradient of "), None)
        outputs = {"buffer seen": "mutation:seen", "output 0 (loss)": "loss:0"}
        found.outputs.pop(outputs.get(lost, ""), None)
        return found

    monkeypatch.setattr(verify, "train_step", losing)
    with pytest.raises(VerificationError, match="in eager alone") as error:
        check(Stateful())
    assert f"{lost} (in eager alone)" in str(error.value)


def test_a_gradient_that_eager_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = Stateful(), verify.train_step
    model.unused = nn.Parameter(torch.ones(2))

    def more(*args: Any, **kwargs: Any) -> StepResult:
        found = right(*args, **kwargs)
        found.gradients["unused"] = torch.zeros(2)
        return found

    assert "gradient of unused" not in {d.name for d in check(model).differences}
    monkeypatch.setattr(verify, "train_step", more)
    with pytest.raises(VerificationError, match=r"unused \(in the compiled model alone\)"):
        check(model)


def test_what_was_not_compared_is_told() -> None:
    model = Stateful()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(VerificationError, match="nothing was compared"):
        check(model)
    nn.init.ones_(model.line.bias)
    (note,) = check(model, (torch.zeros(8, 4),)).notes
    assert note == (
        "compared nothing: gradient of line.weight is zero or NaN throughout on both sides"
    )


def test_compile_verifies_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = autopar.compile(Stateful(), verify=True)
    model(*X).backward()
    assert len(model.plans) == 1
    right = verify.train_step

    def wrong(*args: Any, **kwargs: Any) -> StepResult:
        found = right(*args, **kwargs)
        found.gradients["line.bias"] += 1
        return found

    monkeypatch.setattr(verify, "train_step", wrong)
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"gradient of line\.bias"):
            model(X[0][:4])
    assert len(model.plans) == 1


def compare(model: nn.Module, x: Tensor, pins: dict[str, str], **options: Any) -> Report:
    traced = trace(model, (x,))
    plan = plan_for(traced.graph, "4", pins)
    return compare_program(rewritten(traced, plan), ModelCall(model, (x,), {}), **options)


def test_a_model_without_parameters_has_a_loss_too() -> None:
    (loss,) = check(nn.MSELoss(), (*X, -X[0])).differences
    assert (loss.name, loss.why) == ("output 0 (loss)", "")
