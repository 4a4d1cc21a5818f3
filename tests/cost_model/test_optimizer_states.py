"""What optimizers keep and move, by running every class of torch: states byte for byte, passes
under a dispatch mode; and what becomes of groups, names and parameters that are not trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autopar
from autopar.cost_model.optimizer import state_bytes
from autopar.cost_model.optimizer_kinds import (
    OPTIMIZERS,
    find_kind,
    find_optimizers,
    optimizer_name,
)
from autopar.errors import AutoparError
from autopar.ir.graph import TensorType
from autopar.ir.sharding import Sharding
from autopar.runtime.torch_private import TorchDispatchMode, tree_flatten
from tests.cost_model.optimizer_variants import LR, VARIANTS

SHAPES = ((48, 64), (64,), (), (8, 4, 3, 3), (5, 1))
IMPLEMENTATIONS = ("foreach", "forloop", "fused")


def test_every_class_of_torch_is_run() -> None:
    classes = {x for x in vars(optim).values() if inspect.isclass(x)}
    steps = {x for x in classes if issubclass(x, optim.Optimizer)}
    run = {kind for _, kind, _ in VARIANTS}
    assert steps - run == {optim.Optimizer, optim.SparseAdam}
    known = {name.partition("-")[0] for name, _, _ in VARIANTS} | {"transformers-adafactor"}
    assert {*OPTIMIZERS} - known == {"lion", "none"}


def implemented(kind: type[optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = inspect.signature(kind).parameters
    if "foreach" not in names:
        yield "", {}
        return
    yield "foreach", {"foreach": True}
    yield "forloop", {"foreach": False}
    if "fused" in names:
        yield "fused", {"fused": True}


def numbers(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(values)[0] if isinstance(x, Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind", "settings"), VARIANTS, ids=lambda x: str(x)[:40])
def test_states_are_those_of_torch(
    name: str, kind: Any, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for implementation, choice in implemented(kind):
        for shape in SHAPES:
            if kind is optim.Muon and len(shape) != 2:
                continue
            param = nn.Parameter(torch.randn(shape).to(dtype))
            optimizer = kind([param], **settings, **choice)
            closure = partial(evaluated, param)
            closure()
            optimizer.step(closure)
            kept = list(numbers(list(optimizer.state[param].values())))
            tensor = type_of(param)
            words = (name, implementation) if implementation == "fused" else (name,)
            known = find_kind("-".join(words)).of(tensor)
            expected = state_bytes(known, tensor, (), Sharding.parse("[]"), (), "cpu")
            if kind is optim.LBFGS:
                # A few numbers of all parameters together.
                kept = [x for x in kept if x.dim()]
            assert sum(expected) == sum(x.numel() * x.itemsize for x in kept), (shape, choice)


def evaluated(param: nn.Parameter) -> Tensor:
    """A loss whose curvature is positive, with its gradient."""
    value = param.detach().float()
    param.grad = (4 * value**3 + value).to(param.dtype)
    return (value**4 + value**2 / 2).sum()


def type_of(param: Tensor) -> TensorType:
    dtype = str(param.dtype).removeprefix("torch.")
    return TensorType(dtype, tuple(param.shape), ((),) * param.dim())


class Passes(TorchDispatchMode):
    """Counts the kernels over tensors of `numel` elements, and what they read and write."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.passes, self.kernels = numel, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        large = [x for x in numbers((args, kwargs)) if x.numel() == self.numel]
        before = [x.clone() for x in large] if "_fused_" in str(func) else []
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        read = {x.data_ptr() for x in large}
        if before:
            pairs = zip(large, before, strict=True)
            written = {x.data_ptr() for x, old in pairs if not torch.equal(x, old)}
        else:
            changed = (
                given
                for argument, given in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            out = (x for x in numbers((result, list(changed))) if x.numel() == self.numel)
            written = {x.data_ptr() for x in out}
        self.passes += len(read) + len(written)
        self.kernels += bool(read or written)
        return result


@pytest.mark.parametrize(("name", "kind", "settings"), VARIANTS, ids=lambda x: str(x)[:40])
def test_passes_are_those_of_torch(name: str, kind: Any, settings: dict[str, Any]) -> None:
    is_lbfgs = kind is optim.LBFGS
    settings = {**settings, "max_iter": 1} if is_lbfgs else settings
    for implementation, choice in implemented(kind):
        param = nn.Parameter(torch.randn(48, 64))
        optimizer = kind([param], **settings, **choice)
        counted = Passes(param.numel())
        # RAdam settles within six steps, and the history of LBFGS is full.
        for _ in range(8):
            loss = evaluated(param)
            if not is_lbfgs:
                param.grad = torch.randn(48, 64)
            counted = Passes(param.numel())
            with counted:
                optimizer.step(partial(float, loss) if is_lbfgs else None)
        device = "cuda" if implementation in ("", "foreach") else "cpu"
        known = find_kind(f"{name}-fused" if implementation == "fused" else name)
        assert (counted.passes, counted.kernels) == known.passes(device), implementation


@pytest.mark.parametrize(("name", "kind", "settings"), VARIANTS, ids=lambda x: str(x)[:40])
def test_a_name_is_the_same_of_a_class_and_of_an_optimizer(
    name: str, kind: Any, settings: dict[str, Any]
) -> None:
    assert optimizer_name(partial(kind, **settings)) == name
    assert optimizer_name(kind([nn.Parameter(torch.ones(2, 2))], **settings)) == name
    assert optimizer_name(name.upper()) == name


def test_how_a_step_is_implemented_is_part_of_the_name() -> None:
    def named(make: Callable[..., Any], **settings: Any) -> str:
        return optimizer_name(make([nn.Parameter(torch.ones(2, 2))], **settings))

    assert named(optim.AdamW, amsgrad=True, fused=True) == "adamw-amsgrad-fused"
    assert named(optim.AdamW, foreach=True) == "adamw"
    assert named(optim.AdamW, foreach=False) == "adamw-forloop"
    assert named(optim.RAdam, foreach=True) == "radam-foreach"
    assert find_kind("adamw-fused-amsgrad") == find_kind("adamw-amsgrad-fused")
    assert find_kind("radam").passes("cpu") == find_kind("radam-forloop").passes("cuda")
    assert find_kind("radam-foreach").passes("cpu") == find_kind("radam").passes("cuda")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamw-centered", "adamw has no setting 'centered', but amsgrad, nodecay"),
        ("sgd-nesterov", "nesterov needs momentum"),
        ("rmsprop-fused", "rmsprop has no fused implementation"),
        ("lbfgs-0", "no setting '0'"),
        ("muon; adamw", "behind a semicolon there is a name and what it is for"),
        ("muon; adamw for a.{2-1}", "is no|none"),
    ],
)  # fmt: skip
def test_a_name_that_says_nothing_is_an_error(name: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        find_optimizers(name)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


WEIGHT, BIAS = 4 * 256 * 256, 4 * 256


def planned(model: nn.Module, optimizer: Any) -> autopar.Plan:
    return autopar.plan(model, torch.randn(8, 256), cluster="1xH100", optimizer=optimizer)


def test_each_parameter_has_the_settings_of_its_group() -> None:
    model = TwoLayers()
    first, second = model.layers
    groups = [{"params": first.parameters(), "amsgrad": True}, {"params": second.parameters()}]
    plan = planned(model, optim.AdamW(groups))
    assert plan.structure.optimizer == "adamw; adamw-amsgrad for layers.0.bias layers.0.weight"
    assert plan.estimates.memory.optimizer == (3 + 2) * (WEIGHT + BIAS)
    assert planned(model, plan.structure.optimizer).structure == plan.structure


def test_of_several_optimizers_each_has_its_parameters_and_others_have_none() -> None:
    model = TwoLayers()
    weights = [layer.weight for layer in model.layers]
    both = [optim.Muon(weights), optim.SGD([model.layers[0].bias], **LR)]
    plan = planned(model, both)
    expected = "muon; none for layers.1.bias; sgd for layers.0.bias"
    assert plan.structure.optimizer == expected
    assert plan.estimates.memory.optimizer == 2 * WEIGHT


def test_muon_leaves_all_but_matrices_to_adamw() -> None:
    memory = planned(TwoLayers(), "muon").estimates.memory
    assert memory.optimizer == 2 * WEIGHT + 2 * 2 * BIAS


def test_a_pattern_says_what_steps_on_parameters_and_has_to_meet_some() -> None:
    plan = planned(TwoLayers(), "muon; sgd for *.bias")
    assert plan.estimates.memory.optimizer == 2 * WEIGHT
    with pytest.raises(AutoparError, match="the model has no parameter head"):
        planned(TwoLayers(), "muon; sgd for head.*")


def test_an_optimizer_of_other_parameters_says_what_its_groups_agree_on() -> None:
    other = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    alike = optim.SGD([{"params": other[:1], "lr": 0.2}, {"params": other[1:]}], **LR)
    assert planned(TwoLayers(), alike).structure.optimizer == "sgd"
    unlike = optim.SGD([{"params": other[:1], "momentum": 0.9}, {"params": other[1:]}], **LR)
    with pytest.raises(AutoparError, match="groups differ"):
        planned(TwoLayers(), unlike)


@pytest.mark.parametrize("optimizer", ["adamw", "none"])
def test_what_is_not_trained_has_neither_gradient_nor_states(optimizer: str) -> None:
    model = TwoLayers()
    model.layers[0].requires_grad_(False)
    memory = planned(model, optimizer).estimates.memory
    assert memory.params == 2 * memory.gradients == 2 * (WEIGHT + BIAS)
    assert memory.optimizer == (2 * (WEIGHT + BIAS) if optimizer == "adamw" else 0)
