"""What the processes of `test_values.py` do: values of any dtype, and what a script reads."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.process.digests import BatchDigest, digest_values
from autopar.runtime.process.own_group import broadcast
from tests.grouped import grouped
from tests.runtime.workers import RANK, distance, slow_devices, whole

_OF_NO_TENSOR = (
    "q",
    "bits",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)
DTYPES = sorted(
    {
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    }
    - {name for name in vars(torch) if name in _OF_NO_TENSOR or name.startswith(("q", "bits"))}
)
"""All dtypes of torch that a plain tensor has."""

NO_CASTS = {"float4_e2m1fn_x2"}
"""Those that torch computes nothing of, not even another dtype."""


def values(dtype: torch.dtype, seed: int) -> Tensor:
    """Six rows of two, with bits that are numbers in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 60
    raw = torch.randint(0, most, (12 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(6, 2)


def bits(x: Tensor) -> list[int]:
    return whole(x).detach().contiguous().reshape(-1).view(torch.uint8).tolist()


class Holder(nn.Module):
    """Has a buffer, a number and a frozen parameter of each dtype, and reads what can be read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(2, 4)
        self.p = nn.ParameterDict()
        for k, name in enumerate(DTYPES):
            dtype = getattr(torch, name)
            self.register_buffer(f"b_{name}", values(dtype, seed + k))
            self.register_buffer(f"n_{name}", values(dtype, seed + k + 1)[0, 0])
            self.p[f"p_{name}"] = nn.Parameter(values(dtype, seed + k + 2), requires_grad=False)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        total = self.l(torch.ones(1, 2)).sum()
        for name, x in given.items():
            if name in NO_CASTS:
                continue
            buffer, number = getattr(self, f"b_{name}"), getattr(self, f"n_{name}")
            scale = _number(buffer)[:, 0] * _number(self.p[f"p_{name}"])[:, 1] + _number(number)
            total = total + (self.l(_number(x)).mean(1) * scale.nan_to_num().clamp(-9, 9)).sum()
        return total


def _number(x: Tensor) -> Tensor:
    found = x.to(torch.complex64).real if x.is_complex() else x.float()
    return found.nan_to_num().clamp(-99, 99)


def options() -> dict[str, Any]:
    is_several = os.environ.get("WORLD_SIZE", "1") != "1"
    return {"cluster": slow_devices(2), "strategy": "fsdp"} if is_several else {}


def dtypes() -> dict[str, Any]:
    """Per way that tensors travel, the dtypes that were wrong."""
    eager, model = Holder(0), autopar.compile(Holder(100 * RANK), **grouped(**options()))
    given = {name: values(getattr(torch, name), 5) for name in DTYPES}
    loss, wanted = model(given), eager(given)
    loss.backward()
    wanted.backward()
    seen: dict[str, Any] = {
        "loss": distance(loss, wanted),
        "gradient": distance(model.l.weight.grad, eager.l.weight.grad),
        "of rank 0": _wrong(model, eager),
        "copy": _wrong(copy.deepcopy(model), eager),
    }
    last = dist.get_world_size() - 1 if dist.is_initialized() else 0
    with model.unsharded(rank=last) as plain:
        for held in (eager, plain) if plain is not None else (eager,):
            for tensor in held.state_dict().values():
                tensor.view(-1).view(torch.uint8)[0] ^= 1
    seen["written back"] = _wrong(model, eager)
    if dist.is_initialized():
        rows = autopar.compile(copy.deepcopy(Holder(0)), inputs="local", **grouped(**options()))
        piece = {name: x[3 * RANK :][:3] for name, x in given.items()}
        seen["rows of ranks"] = distance(rows(piece), wanted)
        seen["sent"] = [name for name in DTYPES if not _is_sent(getattr(torch, name))]
    seen["digest"] = [name for name in DTYPES if not _is_told(getattr(torch, name))]
    return seen


def _wrong(ours: nn.Module, theirs: nn.Module) -> list[str]:
    wanted = theirs.state_dict()
    return [name for name, x in ours.state_dict().items() if bits(x) != bits(wanted[name])]


def _is_sent(dtype: torch.dtype) -> bool:
    x = values(dtype, RANK)
    broadcast(x, 1)
    return bits(x) == bits(values(dtype, 1))


def _is_told(dtype: torch.dtype) -> bool:
    """Whether digests tell batches apart, and the same again."""
    first, same, other = values(dtype, 1), values(dtype, 1), values(dtype, 9)
    digest = BatchDigest()
    return digest_values([first]) == digest_values([same]) != digest_values([other]) and digest(
        [first]
    ) == digest([same]) != digest([other])


Read = Callable[[Any], object]

READS: dict[str, Read] = {
    "format": lambda t: f"{t:.3f}",
    "wide": lambda t: f"{t:>12.2e}|{t:+.1f}",
    "format of integers": lambda t: f"{t:d}",
    "plain format": lambda t: str(f"{t}").count("tensor("),
    "%": lambda t: "%.3f" % t,  # noqa: UP031
    "%s": lambda t: ("%s" % t)[:70].partition("grad_fn")[0],  # noqa: UP031
    "str.format": lambda t: "{:.2f}".format(t),  # noqa: UP032
    "repr": lambda t: repr(t)[:70].partition("grad_fn")[0],
    "float": lambda t: round(float(t), 5),
    "int": int,
    "bool": bool,
    "complex": lambda t: round(complex(t).real, 5),
    "item": lambda t: round(t.item(), 5),
    "tolist": lambda t: torch.tensor(t.tolist()).mul(1000).round().tolist(),
    "numpy": lambda t: t.detach().cpu().numpy().astype(float).round(4).tolist(),
    "array": lambda t: np.asarray(t.detach()).astype(float).round(4).tolist(),
    "round": lambda t: round(t, 2),
    "sqrt": lambda t: round(math.sqrt(abs(t)), 5),
    "isfinite": math.isfinite,
    "floor": math.floor,
    "trunc": math.trunc,
    "index": lambda t: [1, 2, 3][t],
    "range": lambda t: len(range(t)),
    "divmod": lambda t: divmod(t, 2),
    "len": len,
    "max": lambda t: round(float(max(t, t)), 5),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.l(x)
        return y.square().mean(), y


def readings() -> dict[str, dict[str, list[str]]]:
    """What a script reads of all it gets hold of, of the compiled model and of eager's."""
    ours, theirs = _held(autopar.compile(Net(), **grouped(**options()))), _held(Net())
    return {
        name: {
            read: [_read(call, each) for each in (ours[name], theirs[name])]
            for read, call in READS.items()
        }
        for name in ours
    }


def _held(model: nn.Module) -> dict[str, Any]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    loss, y = model(x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    weight: Any = model.get_parameter("l.weight")
    return {
        "loss": loss, "norm": norm, "output": y, "number of the output": y.detach()[3, 1],
        "sum of the output": y.sum(), "one element": y[5:6, :1], "a count": (y > 0).sum(),
        "weight": weight, "bias": model.get_parameter("l.bias"), "gradient": weight.grad,
        "its norm": weight.grad.norm(), "norm of the weight": weight.norm(),
        "number of the weight": weight[3, 2], "element of the weight": weight[3:4, :1],
        "a mask": weight > 0, "its count": (weight > 0).sum(), "one": (weight > 5).sum() + 1,
        "a loss by itself": F.mse_loss(y.detach(), torch.zeros(8, 4)),
    }  # fmt: skip


def _read(call: Read, value: Any) -> str:
    try:
        with warnings.catch_warnings():
            # Where eager does, a number is read of what has a gradient.
            warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
            return str(call(value))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return type(error).__name__


def all_of_them() -> dict[str, Any]:
    return {"readings": readings(), "dtypes": dtypes()}
