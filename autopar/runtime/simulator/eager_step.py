"""One eager training step, on the model itself, in its dtype or another."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, VerificationError
from autopar.ir.graph import Graph, Role
from autopar.runtime.module.executable import owner_of
from autopar.runtime.module.params import buffer_places
from autopar.runtime.program.externals import Substitutes, external_number
from autopar.runtime.program.spent import is_spent, spending_noted
from autopar.runtime.simulator.differences import SimulatedStep
from autopar.runtime.simulator.spmd import StepResult
from autopar.runtime.torch_private import (
    TorchDispatchMode,
    TreeSpec,
    flatten,
    map_tensors,
    tree_map,
    unflatten,
)

# Steps computed in another floating dtype than the one they were written in.

aten = torch.ops.aten

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_WIDENING = (aten._softmax.default, aten._log_softmax.default)
"""Ops whose third argument says that a half becomes a float."""


def in_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """`tensor` in the floating dtype called `dtype`, or as it is if it is not floating; complex
    numbers have parts of that dtype."""
    return tensor.to(_other(tensor.dtype, getattr(torch, dtype)))


def computing_in(dtype: str | None) -> AbstractContextManager[Any]:
    """Inside, all ops compute in the floating dtype called `dtype`, casts to another included; a
    model that computes in float32 whatever it is cast to computes in float64 here. None changes
    nothing."""
    return nullcontext() if dtype is None else _Computing(getattr(torch, dtype))


class _Computing(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.view.dtype:  # reads the same bits as something else
            return func(*args)
        args, kwargs = tree_map(self._cast, (args, kwargs or {}))
        if func in _WIDENING:
            args = (*args[:2], False)
        return tree_map(self._cast, func(*args, **kwargs))

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _other(value, self._dtype)
        if isinstance(value, Tensor) and _other(value.dtype, self._dtype) != value.dtype:
            return value.to(_other(value.dtype, self._dtype))
        return value


def _other(dtype: torch.dtype, floating: torch.dtype) -> torch.dtype:
    if dtype in _FLOATING:
        return floating
    return floating.to_complex() if dtype in _COMPLEX else dtype


TOLERANCES: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""The relative difference that rounding explains, by the least precise dtype of a step."""


def whole_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Copies of all that goes into a step, named as in `Program.forward_inputs`.

    AutoparError if a tensor has no values.
    """
    named = {f"param:{name}": param for name, param in model.named_parameters()}
    named |= {f"buffer:{name}": buffer for _, _, name, buffer in buffer_places(model)}
    leaves, _ = flatten((args, kwargs))
    named |= {f"input:{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for name, tensor in named.items():
        if tensor.is_meta:
            raise AutoparError(f"{name} is on the meta device: to compare, values are needed")
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def tangents(graph: Graph, seed: int, device: torch.device | None) -> dict[int, Tensor]:
    """The tangents of outputs, by position: ones for losses, random directions for others."""
    generator = torch.Generator().manual_seed(seed)
    directions: dict[int, Tensor] = {}
    for node in graph.with_role(Role.LOSS, Role.VALUE):
        kind = graph.type_of(node.inputs[0])
        direction = torch.ones(kind.shape, dtype=torch.float64)
        if node.role is Role.VALUE:
            direction = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        directions[int(node.target)] = direction.to(device, getattr(torch, kind.dtype))
    return directions


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Inside, random numbers are those that follow `seed`; outside, as if none were drawn."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def own_values(model: nn.Module, dtype: str | None = None) -> Generator[None, None, None]:
    """Inside, the tensors that the modules of `model` hold have copies of their values, floating
    ones in `dtype` if one is given, and no gradients. Outside, they have their own.

    They are the same tensors, so other references to them, such as from a function that the model
    holds, see these values. A copy of the model would miss those, and not every model can be
    copied.
    """
    held = {id(x): x for module in model.modules() for x in _tensors(module)}.values()
    before = [(x, x.data, x.grad if x.is_leaf else None) for x in held]
    try:
        for tensor, data, grad in before:
            if grad is not None:
                tensor.grad = None
            copied = data.clone()
            tensor.data = copied if dtype is None else in_dtype(copied, dtype)
        yield
    finally:
        for tensor, data, grad in before:
            if tensor.is_leaf:
                tensor.grad = None
            tensor.data = data
            if tensor.is_leaf:
                tensor.grad = grad


@contextmanager
def own_externals(
    model: nn.Module, real: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Generator[Mapping[str, Tensor], None, None]:
    """Inside, forward reads leaves with these `values` in place of the script's tensors, which are
    `real`. Yields the leaves, which have gradients after a backward. No gradient flows on to what
    the script's tensors were computed from."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in values.items()}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for name in (name for name in real if external_number(name) is None):
        module, attribute = owner_of(model, name)
        table: dict[str, Any] = module._buffers if attribute in module._buffers else vars(module)
        replaced.append((table, attribute, table[attribute]))
        table[attribute] = leaves[name]
    try:
        with Substitutes({id(x): leaves[name] for name, x in real.items()}):
            yield leaves
    finally:
        for table, attribute, held in replaced:
            table[attribute] = held


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are mere attributes."""
    for table in (module._parameters, module._buffers, vars(module)):
        yield from (x for x in table.values() if isinstance(x, Tensor))


def eager_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    form: tuple[TreeSpec, int],
    directions: Mapping[int, Tensor],
) -> SimulatedStep:
    """The step by PyTorch alone. It has every output of `form` (a structure and its number of
    leaves), every buffer and parameter, and every gradient. Other return values, such as a cache,
    are left out.

    The model is changed as a step changes it: see `own_values`.
    """
    before = {name: x.clone() for name, x in (_buffers(model) | _parameters(model)).items()}
    # A model may require gradients of its inputs, for derivatives that it takes within forward.
    args, kwargs = map_tensors(lambda x: x if x.requires_grad else x.detach(), (args, kwargs))
    trained = torch.is_grad_enabled() or any(x.requires_grad for x in model.parameters())
    with torch.set_grad_enabled(trained), spending_noted() as spending:
        leaves = _in_form(model(*args, **kwargs), *form)
    outputs = {str(k): x for k, x in enumerate(leaves) if isinstance(x, Tensor)}
    spent = {name for name, x in outputs.items() if spending and is_spent(x)}
    able = _ends({name: x for name, x in outputs.items() if name not in spent})
    ends = [k for k in directions if leaves[k].requires_grad]
    if ends:
        torch.autograd.backward([leaves[k] for k in ends], [directions[k] for k in ends])
    buffers, parameters = _buffers(model), _parameters(model)
    return SimulatedStep(
        outputs={name: x.detach() for name, x in outputs.items()},
        buffers=buffers,
        parameters=parameters,
        gradients={n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None},
        ends=frozenset(able),
        changed=frozenset(
            name
            for name, x in (buffers | parameters).items()
            if name not in before or not _same(before[name], x)
        ),
    )


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.named_buffers(remove_duplicate=False)}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in model.named_parameters()}


def _same(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    # Those on meta have no values.
    return after.is_meta or bool(
        ((before == after) | ((before != before) & (after != after))).all()
    )


def _ends(outputs: Mapping[str, Tensor]) -> list[str]:
    """The outputs that are differentiated: losses, or else all that can be."""
    able = {k: x for k, x in outputs.items() if x.requires_grad}
    return [k for k, x in able.items() if x.dim() == 0] or list(able)


def _in_form(result: Any, spec: TreeSpec, count: int) -> list[Any]:
    """The leaves of `result` in the order of `spec`, which has `count` of them."""
    leaves, own = flatten(result)
    if own == spec:
        return leaves
    here = {path: leaves[k] for path, k in _number_paths(unflatten(range(len(leaves)), own))}
    there = [path for path, _ in _number_paths(unflatten(range(count), spec))]
    if all(path in here for path in there):
        return [here[path] for path in there]
    plain = [x for x in leaves if x is None or isinstance(x, (Tensor, bool, int, float, str))]
    if len(plain) == count:
        return plain
    raise VerificationError(
        f"eager returns {len(leaves)} values where the compiled model returns {count}: {own}"
    )


def _number_paths(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """(path, leaf) of every number in nested containers, in order of the leaves."""
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, int):
        yield path, value
    for key, inner in items:
        yield from _number_paths(inner, f"{path}.{key}")


def step_of(result: StepResult) -> SimulatedStep:
    """The results of ranks, in the form of an eager step."""
    named: dict[str, dict[str, Tensor]] = {"output": {}, "mutation": {}, "update": {}}
    ends: list[str] = []
    for name, tensor in result.outputs.items():
        role, _, target = name.partition(":")
        named[role if role in named else "output"][target] = tensor
        if result.gradients and role in (Role.LOSS.value, Role.VALUE.value):
            ends.append(target)
    return SimulatedStep(
        named["output"], named["mutation"], named["update"], result.gradients, frozenset(ends)
    )
