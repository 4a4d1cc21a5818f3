"""Values for a model on the meta device, as its own modules would give them, one tensor at a time.

Each tensor is initialised by itself, in a copy of the model in which all else stays on meta. The
methods that initialise it run there, with random numbers that start from the seed and the tensor's
name. So its values depend on the seed, the name and the model alone: not on other tensors, the
mesh, or the number of ranks. Eager draws all tensors from one stream of random numbers, in the
order in which modules are made: the distributions are the same, the numbers are not.

The methods are `reset_parameters()` or `_reset_parameters()`, as in torch, of the module that holds
the tensor and then of each module around it. Then comes `_init_weights(module)` of the nearest
module around that has it, as in `transformers`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from autopar.errors import WeightsError
from autopar.runtime.checkpoint.lazy import Region

_RESET = ("reset_parameters", "_reset_parameters")
_INIT = "_init_weights"

_Pass = Callable[[list[nn.Module]], None]
"""Runs initialising methods of modules, the innermost first."""


class Initialiser:
    """Makes the values of parameters and buffers of `model`, which may be on meta.

    The model is copied without its values, so that it may change later.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        memo: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = _like(tensor, empty)
        try:
            self._model = copy.deepcopy(model, memo)
        except Exception as error:
            raise WeightsError(
                f"the model cannot be copied, which initialising it needs: {error}"
            ) from error
        self._seed = seed

    def read(self, name: str, place: Region) -> Tensor:
        """The rectangle of the tensor called `name` at `place`, in memory of its own, on the CPU.
        The whole tensor is made meanwhile."""
        return self.whole(name)[place].clone(memory_format=torch.contiguous_format)

    def whole(self, name: str) -> Tensor:
        """The tensor called `name`; WeightsError if no method of the model initialises it."""
        try:
            value = self._initialised(name, [name])
        except Exception:
            # A method that looks at the values of its module's other tensors needs them.
            value = self._initialised_with_others(name)
        if value is None:
            path = name.rpartition(".")[0] or "the model"
            raise WeightsError(
                f"{name} is on the meta device, and nothing initialises it: give {path} (or a "
                "module around it) a method reset_parameters that does, or make the model under "
                "autopar.on_meta(), where buffers keep their values"
            )
        return value

    def _initialised_with_others(self, name: str) -> Tensor | None:
        path, _, _ = name.rpartition(".")
        module = self._model.get_submodule(path)
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        try:
            return self._initialised(name, [f"{path}.{leaf}" if path else leaf for leaf, _ in own])
        except Exception as error:
            raise WeightsError(f"initialising {name} failed: {error}") from error

    def _initialised(self, name: str, real: list[str]) -> Tensor | None:
        """The value, while the tensors called `real` have memory; None if a part of it is not
        initialised. The methods of the model often initialise all: those of torch run only if they
        do not."""
        for passes in ((_by_model,), (_by_torch, _by_model)):
            value = self._run(name, real, 0, passes)
            if value.is_floating_point() or value.is_complex():
                done = not value.isnan().any()
            else:
                done = torch.equal(value, self._run(name, real, 1, passes))
            if done:
                return value
        return None

    def _run(self, name: str, real: list[str], fill: int, passes: tuple[_Pass, ...]) -> Tensor:
        with self._with_memory(real, fill), _seeded(self._seed, name), torch.device("cpu"):
            around = list(_around(self._model, name.rpartition(".")[0]))
            for one in passes:
                one(around)
            return _get(self._model, name).detach()

    @contextmanager
    def _with_memory(self, names: list[str], fill: int) -> Generator[None, None, None]:
        """Inside, the tensors called `names` are real, in every module that has them."""
        before: list[tuple[dict[str, Any], str, Tensor]] = []
        for name in names:
            empty = _get(self._model, name)
            value = float("nan") if empty.is_floating_point() or empty.is_complex() else fill
            full = _like(empty, torch.full(empty.shape, value, dtype=empty.dtype, device="cpu"))
            for table in state_tables(self._model):
                for leaf, tensor in table.items():
                    if tensor is empty:
                        before.append((table, leaf, empty))
                        table[leaf] = full
        try:
            yield
        finally:
            for table, leaf, empty in before:
                table[leaf] = empty


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    is_param = isinstance(tensor, nn.Parameter)
    return nn.Parameter(data, tensor.requires_grad) if is_param else data


def _by_torch(around: list[nn.Module]) -> None:
    """As constructors do: the innermost first."""
    for module in around:
        for name in _RESET:
            method = getattr(module, name, None)
            if callable(method) and _takes(method, 0):
                method()


def _by_model(around: list[nn.Module]) -> None:
    """As `transformers` does once a model is made, and `model.apply(self._init_weights)`."""
    for k, module in enumerate(around):
        methods = (getattr(owner, _INIT, None) for owner in around[k:])
        method = next((m for m in methods if callable(m) and _takes(m, 1)), None)
        if method is not None:
            method(module)


def _takes(method: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return False
    return True


@contextmanager
def _seeded(seed: int, name: str) -> Generator[None, None, None]:
    """Inside, random numbers of the CPU depend on `seed` and `name`, and gradients are off."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        yield


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at `path`, then the one that has it, up to the model."""
    names = path.split(".") if path else []
    for length in range(len(names), -1, -1):
        yield model.get_submodule(".".join(names[:length]))


def _get(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def state_tables(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Where its modules have parameters and buffers."""
    for module in model.modules():
        yield module._parameters
        yield module._buffers


_TWIN = "_autopar_meta"


@contextmanager
def on_meta() -> Generator[None, None, None]:
    """Inside, modules are made with their parameters on the meta device: shapes without values.

    `with autopar.on_meta(): model = MyModel()`. Unlike under `torch.device("meta")`, everything
    else has values, buffers above all, so that nothing that `__init__` computes is lost. Parameters
    get theirs from `autopar.compile(model, weights=...)` or `autopar.compile(model, seed=...)`.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        known = vars(param)
        if _TWIN not in known:
            meta_param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            vars(meta_param).update(known)
            # For a second module that is given the same parameter: tied ones stay tied.
            known[_TWIN] = meta_param
        return known[_TWIN]

    hook: Any = to_meta
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
