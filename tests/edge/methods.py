"""What scripts do with a tensor beside ops: transforms of functions, derivatives forward, copies,
files, values for Python and numpy, storage, hooks. They are tried as ops of the database are.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

SHAPES = ((6, 4), (5,), (), (1, 3), (4, 0), (2, 3, 2))


@dataclass(frozen=True, slots=True)
class _Arguments:
    input: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """As an op of torch's database, as far as `samples` asks."""

    name: str
    op: Callable[..., Any]
    variant_test_name: str = ""
    inplace_variant: None = None
    supports_out: bool = False
    supports_autograd: bool = True

    def supports_dtype(self, dtype: torch.dtype, _device: str) -> bool:
        return dtype is torch.float64

    def sample_inputs(
        self, _device: str, dtype: torch.dtype, *, requires_grad: bool
    ) -> Iterator[_Arguments]:
        for shape in SHAPES:
            x = torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)
            yield _Arguments(x, (), {})


def _energy(x: Tensor) -> Tensor:
    return (x.sin() * x.square()).sum()


def _rows(x: Tensor) -> Tensor:
    return x.sin() * x.flatten().cumsum(0).view_as(x)


def _tangent(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, max(1, x.numel()), dtype=x.dtype)[: x.numel()].view(x.shape)


def _dual(x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(_rows(forward_ad.make_dual(x, _tangent(x)))))


def _several_gradients(x: Tensor) -> Any:
    made = _rows(x)
    directions = torch.stack([_tangent(x) * k for k in range(3)])
    return torch.autograd.grad(made, x, directions, is_grads_batched=True)


def _twice(x: Tensor) -> Any:
    (first,) = torch.autograd.grad(_energy(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return torch.load(file)


def _as_leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _grad_of_a_leaf(x: Tensor) -> Tensor | None:
    leaf = _as_leaf(x)
    _energy(leaf).backward()
    return leaf.grad


def _grad_that_is_set(x: Tensor) -> Tensor | None:
    leaf = _as_leaf(x)
    leaf.grad = leaf.detach() * 2
    leaf.grad.add_(1)
    return leaf.grad


def _retained(x: Tensor) -> Tensor | None:
    made = x * 2
    made.retain_grad()
    _energy(made).backward()
    return made.grad


def _hooked(x: Tensor) -> Tensor:
    made = x * 1
    made.register_hook(lambda gradient: gradient * 3)
    return made


def _data_that_is_set(x: Tensor) -> Tensor:
    made = x.detach().clone()
    made.data = made.data * 2
    return made


def _changed_by_data(x: Tensor) -> Tensor:
    made = x.detach().clone()
    made.data.mul_(2)
    made.data[..., :1].add_(1)
    return made


def _filled(made: Tensor) -> Tensor:
    return made.fill_(1.5)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def _in_a_thread(x: Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: (x.detach().sum().item(), x.detach().cumsum(-1))).result()


def _packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return _energy(x)


_METHODS: dict[str, Callable[[Tensor], Any]] = {
    # transforms of functions
    "func.grad": lambda x: grad(_energy)(x),
    "func.vjp": lambda x: vjp(_rows, x)[1](_tangent(x)),
    "func.jvp": lambda x: jvp(_rows, (x,), (_tangent(x),)),
    "func.linearize": lambda x: linearize(_rows, x)[1](_tangent(x)),
    "func.jacrev": lambda x: jacrev(_rows)(x),
    "func.jacfwd": lambda x: jacfwd(_rows)(x),
    "func.hessian": lambda x: hessian(_energy)(x),
    "func.vmap": lambda x: vmap(_rows)(x),
    "func.vmap of the last dim": lambda x: vmap(_energy, in_dims=-1)(x),
    "func.vmap of grad": lambda x: vmap(grad(_energy))(x),
    "func.vmap beside": lambda x: vmap(torch.mul, in_dims=(0, None))(x, torch.arange(3.0)[:1]),
    "func.functionalize": lambda x: functionalize(_rows)(x),
    # derivatives
    "autograd.dual_level": _dual,
    "autograd.is_grads_batched": _several_gradients,
    "autograd.grad of grad": _twice,
    "autograd.functional.jacobian": lambda x: functional.jacobian(_rows, x),
    "autograd.functional.hessian": lambda x: functional.hessian(_energy, x),
    "autograd.functional.vhp": lambda x: functional.vhp(_energy, x, _tangent(x)),
    "fx.make_fx": lambda x: make_fx(_rows)(x)(x),
    "autograd.Function": lambda x: _Cube.apply(x),
    "autograd.saved_tensors_hooks": _packed,
    "autograd.checkpoint": lambda x: checkpoint(_rows, x, use_reentrant=False),
    "autograd.checkpoint, reentrant": lambda x: checkpoint(_rows, x, use_reentrant=True),
    "tensor.register_hook": _hooked,
    "tensor.retain_grad": _retained,
    "tensor.grad": _grad_of_a_leaf,
    "tensor.grad, set": _grad_that_is_set,
    "tensor.data": lambda x: x.data * 2,
    "tensor.data, set": _data_that_is_set,
    "tensor.data, changed": _changed_by_data,
    "tensor.requires_grad_": lambda x: _energy(_as_leaf(x)),
    # copies and files
    "copy.copy": lambda x: copy.copy(x.detach()),
    "copy.deepcopy": lambda x: copy.deepcopy(x.detach()),
    "copy.pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "copy.torch.save": _saved,
    "copy.collate": lambda x: default_collate([x.detach(), x.detach()]),
    # values for Python and numpy
    "tensor.numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "numpy.asarray": lambda x: torch.from_numpy(np.array(x.detach())),
    "numpy.add": lambda x: torch.from_numpy(np.array(np.add(x.detach().numpy(), 1.0))),
    "numpy.mean": lambda x: float(np.mean(x.detach().numpy())),
    "numpy.from_dlpack": lambda x: torch.from_numpy(np.array(np.from_dlpack(x.detach()))),
    "tensor.from_dlpack": lambda x: torch.from_dlpack(x.detach()) * 2,
    "tensor.tolist": lambda x: x.tolist(),
    "tensor.item": lambda x: x.sum().item(),
    "python.format": lambda x: f"{x.sum():.9f}",
    "python.str": lambda x: str(x.detach()),
    "python.repr": lambda x: repr(x.detach()),
    "python.bool": lambda x: bool(x.sum() > 0),
    "python.float": lambda x: (float(x.sum()), int(x.sum()), complex(x.sum())),
    "python.math": lambda x: math.sqrt(x.sum().abs()),
    "python.index": lambda x: ["a", "b", "c"][x.flatten().argmax() % 3],
    "python.len": lambda x: len(x),
    "python.iter": lambda x: [row * 2 for row in x],
    "python.sum": lambda x: sum(x.flatten(), torch.zeros((), dtype=x.dtype)),
    "python.max": lambda x: max(x.flatten()),
    "python.in": lambda x: float(x.flatten()[0].item()) in x,
    "python.threads": _in_a_thread,
    # made like it
    "made.new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "made.new_empty": lambda x: _filled(x.new_empty(x.shape)),
    "made.new_empty_strided": lambda x: _filled(x.new_empty_strided(x.shape, x.stride())),
    "made.empty_like": lambda x: _filled(torch.empty_like(x.detach())),
    "made.as_tensor": lambda x: torch.as_tensor(x) * 2,
    "made.asarray": lambda x: torch.asarray(x.detach()) * 2,
    "made.stack of rows": lambda x: torch.stack(list(x)),
    # storage
    "storage.nbytes": lambda x: x.detach().clone().untyped_storage().nbytes(),
    "storage.tolist": lambda x: x.detach().clone().untyped_storage().tolist(),
    "storage.typed": lambda x: x.detach().clone().storage().tolist(),
    "storage.same": lambda x: x.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(),
    "storage.data_ptr": lambda x: x.data_ptr() == x.detach().data_ptr(),
    "tensor.set_": lambda x: x.detach().clone().set_(x.detach().clone().untyped_storage()),
    "tensor.is_set_to": lambda x: x.is_set_to(x),
    "tensor.share_memory_": lambda x: x.detach().clone().share_memory_() * 2,
    "tensor.layout": lambda x: (x.stride(), x.storage_offset(), x.is_contiguous(), x.nbytes),
    "tensor.kind": lambda x: (x.type(), str(x.device), x.is_leaf == x.is_leaf, x.numel()),
    "tensor.cpu": lambda x: x.cpu() * 2,
    "tensor.meta": lambda x: tuple(x.to("meta").shape),
}  # fmt: skip


def methods() -> list[Method]:
    """All of them, in order of their names."""
    return [Method(name, _METHODS[name]) for name in sorted(_METHODS)]
