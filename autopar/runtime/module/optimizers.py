"""Steps of torch's optimizers on sharded parameters, equal to those on whole ones.

The parameters and gradients of a compiled model are DTensors. An optimizer that treats each element
by itself steps on the local shards: exact, and without DTensor's cost per operation. One that needs
whole tensors (Adafactor's row means, Muon's orthogonal update) steps on one whole parameter at a
time. LBFGS, which needs all of them together, steps on all of them whole. States of a parameter's
shape become DTensors placed as the parameter is, so that `torch.distributed.checkpoint` saves them
and loads them on another mesh.

States from before the parameter was sharded, and whole ones that were loaded, are sharded as it is,
with the values of rank 0.

Hooks right before and after every `Optimizer.step` do this, for the optimizers of `torch.optim`,
the Adafactor of transformers, and parameters of compiled models alone. Other optimizers see
DTensors, and so do the hooks that a script has registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import cut_shard, dtensor_of, shard_of
from autopar.runtime.process import reading
from autopar.runtime.process.alone import step_together
from autopar.runtime.process.moves import moves
from autopar.runtime.process.part_tensors import is_of_some_ranks, shard_of_rank_0
from autopar.runtime.torch_private import step_next_to

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip
BY_TENSOR: frozenset[type[Optimizer]] = frozenset({optim.Adafactor, optim.Muon})
BY_TENSOR_ELSEWHERE = frozenset({"transformers.optimization.Adafactor"})
"""The same of other libraries, which may not be there."""
TOGETHER: frozenset[type[Optimizer]] = frozenset({optim.LBFGS})
UNABLE: frozenset[type[Optimizer]] = frozenset({optim.SparseAdam})
"""Those that no compiled model can be trained with."""

_MARK = "_autopar_sharded"


def mark(param: Tensor) -> None:
    """Mark `param` as a compiled model's: the hooks act on these."""
    vars(param)[_MARK] = True
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


_handles: list[Any] = []
_hooked: WeakKeyDictionary[Optimizer, tuple[Any, Any]] = WeakKeyDictionary()
_stepping: WeakKeyDictionary[Optimizer, _Stepping] = WeakKeyDictionary()


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _leave(optimizer, args, kwargs)  # of a step that failed
    _follow(optimizer)
    kind = type(optimizer)
    if not any(_is_ours(p) for group in optimizer.param_groups for p in group["params"]):
        return
    _save_whole(optimizer)
    step_together(optimizer)
    moves.begin()
    if kind in UNABLE:
        raise AutoparError(
            f"{kind.__name__} needs sparse gradients, and a compiled model has dense ones: take "
            "Adam or AdamW"
        )
    if optimizer not in _hooked:
        _hooked[optimizer] = (
            optimizer.register_step_pre_hook(_enter),
            optimizer.register_step_post_hook(_leave),
        )
    # The script's own hooks see parameters as they are between steps.
    step_next_to(optimizer, *_hooked[optimizer])


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if moves.are_going_on:
        moves.step_ends()


def _enter(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace parameters by their stand-ins for the step, also around a closure."""
    kind = type(optimizer)
    _adopt(optimizer)
    by_tensor = kind in BY_TENSOR or f"{kind.__module__}.{kind.__name__}" in BY_TENSOR_ELSEWHERE
    if not by_tensor and kind not in ELEMENTWISE | TOGETHER:
        return None
    stepping = _ByTensor(optimizer) if by_tensor else _Stepping(optimizer)
    _stepping[optimizer] = stepping
    args, kwargs = stepping.around_closure(args, kwargs)
    stepping.enter()
    return args, kwargs


def _leave(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stepping = _stepping.pop(optimizer, None)
    if stepping is not None:
        stepping.leave()


_saving_whole: WeakSet[Optimizer] = WeakSet()


def _save_whole(optimizer: Optimizer) -> None:
    """Where single ranks save, the optimizer's `state_dict()` has whole tensors."""
    reader = reading.running()
    if reader is None or not reader.saves or optimizer in _saving_whole:
        return
    _saving_whole.add(optimizer)

    def gather(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        names = reader.names()
        states = {
            index: {
                key: reader.whole(names[id(value)], value) if isinstance(value, DTensor) else value
                for key, value in state.items()
            }
            for index, state in saved["state"].items()
        }
        return {**saved, "state": states}

    optimizer.register_state_dict_post_hook(gather)


def _follow(optimizer: Optimizer) -> None:
    """Move states to the memory of plain parameters, which may have been moved to the host."""
    for param, state in optimizer.state.items():
        if not isinstance(param, DTensor) and _MARK in vars(param):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device != param.device:
                    state[key] = value.to(param.device)


@torch.no_grad()
def _adopt(optimizer: Optimizer) -> None:
    """Shard states of a parameter's shape as it is. A collective call if any were not."""
    for param, state in optimizer.state.items():
        if not isinstance(param, DTensor) or not _is_ours(param):
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != param.shape or not value.dim():
                continue
            mesh, placements = param.device_mesh, param.placements
            if not isinstance(value, DTensor):
                _check_values(optimizer, value)
                whole = value.to(torch.device(mesh.device_type))
                state[key] = _distributed(param, shard_of_rank_0(whole, mesh, placements))
            elif value.device_mesh != mesh:
                # Made before the parameter was sharded.
                _check_values(optimizer, value)
                shard = cut_shard(value.full_tensor(), mesh, placements).clone()
                state[key] = _distributed(param, shard)


def _check_values(optimizer: Optimizer, state: Tensor) -> None:
    if state.is_meta:
        raise AutoparError(
            f"{type(optimizer).__name__} has a state made of parameters without values: make the "
            "optimizer after the model's first call, or after model.prepare(...)"
        )


def _is_ours(param: Tensor) -> bool:
    return isinstance(param, DTensor) and _MARK in vars(param)


class _Stepping:
    """An optimizer while it steps on plain tensors: local shards, or whole ones for those in
    `TOGETHER`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.whole = type(optimizer) in TOGETHER
        self.lists: list[tuple[list[Tensor], list[Tensor]]] = []
        self.pairs: list[tuple[DTensor, nn.Parameter]] = []
        self.known: dict[int, DTensor] = {}

    def around_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step, the optimizer first, with the closure wrapped by `called`."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        return (args, kwargs) if closure is None else ((self.optimizer, self.called(closure)), {})

    def called(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that finds the parameters as it knows them."""

        def call() -> Any:
            self.leave()
            try:
                return closure()
            finally:
                self.enter()

        return call

    @torch.no_grad()
    def enter(self) -> None:
        for group in self.optimizer.param_groups:
            params: list[Tensor] = group["params"]
            self.lists.append((params, list(params)))
            # The list itself is changed: LBFGS keeps a reference to it.
            params[:] = [self._stand_in(p) if _is_ours(p) else p for p in params]

    @torch.no_grad()
    def leave(self) -> None:
        for params, before in self.lists:
            params[:] = before
        for param, plain in self.pairs:
            if self.whole:
                param.to_local().copy_(cut_shard(plain, param.device_mesh, param.placements))
            if plain in self.optimizer.state:
                state = self.optimizer.state[param] = self.optimizer.state.pop(plain)
                # In place: LBFGS holds on to it while it calls the closure.
                for key, value in state.items():
                    state[key] = self._stored(param, plain, value)
        self.lists, self.pairs, self.known = [], [], {}

    def _stand_in(self, param: Tensor) -> nn.Parameter:
        assert isinstance(param, DTensor)
        data = param.full_tensor() if self.whole else shard_of(param)
        plain = nn.Parameter(data.detach(), requires_grad=param.requires_grad)
        if param.grad is not None:
            plain.grad = self._plain(param, param.grad, ours=False)
        if param in self.optimizer.state:
            state = self.optimizer.state[plain] = self.optimizer.state.pop(param)
            for key, value in state.items():
                state[key] = self._plain(param, value, ours=True)
        self.pairs.append((param, plain))
        return plain

    def _plain(self, param: DTensor, value: Any, *, ours: bool) -> Any:
        """A gradient or state of `param` as the optimizer sees it while it steps."""
        if not isinstance(value, DTensor):
            return value
        if self.whole:
            return value.full_tensor()
        mesh, is_here = param.device_mesh, value.device_mesh == param.device_mesh
        if is_here and value.placements == param.placements:
            local = shard_of(value)
        elif not is_here or is_of_some_ranks(mesh):
            local = cut_shard(value.full_tensor(), mesh, param.placements)
            value = _distributed(param, local)
        else:
            value = value.redistribute(placements=param.placements)
            local = value.to_local()
        if ours:
            self.known[id(local)] = value
        return local

    def _stored(self, param: DTensor, plain: Tensor, value: Any) -> Any:
        """A state in its form between steps."""
        if not isinstance(value, Tensor) or value.shape != plain.shape or value.dim() == 0:
            return value
        known = self.known.get(id(value))
        if known is not None:
            return known
        if self.whole:
            value = cut_shard(value, param.device_mesh, param.placements).clone()
        return _distributed(param, value)


class _ByTensor(_Stepping):
    """An optimizer that steps on one whole parameter after the other, as if it had no others."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.whole = True

    def called(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure is called first of all: each parameter's step needs its gradients."""
        with torch.enable_grad():
            loss = closure()
        return lambda: loss

    @torch.no_grad()
    def enter(self) -> None:
        # Below the hooks, which are for whole steps.
        kind: Any = type(self.optimizer)
        step = getattr(kind.step, "__wrapped__", kind.step)
        params = (group["params"] for group in self.optimizer.param_groups)
        self.lists = [(each, list(each)) for each in params]
        for params, _ in self.lists:
            params.clear()
        for params, before in self.lists:
            for param in before:
                if param.grad is None:
                    continue
                params[:] = [self._stand_in(param) if _is_ours(param) else param]
                step(self.optimizer)
                params.clear()
                lists, self.lists = self.lists, []
                self.leave()
                self.lists = lists


def _distributed(param: DTensor, local: Tensor) -> DTensor:
    """`local` as the shard of a DTensor that is stored as `param` is, in the same memory."""
    return dtensor_of(local.to(param.to_local().device), param, param.device_mesh, param.placements)
