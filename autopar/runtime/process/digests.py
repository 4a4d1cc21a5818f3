"""Short texts that stand for a model's parameters and for a batch, for ranks to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

BATCH = "batch (all ranks must be handed the same global one)"
"""The name of the digest of inputs, in errors."""


def param_types(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global shape and dtype name of each parameter, under its first name."""
    return {
        name: (tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for name, param in model.named_parameters()
    }


def digest_params(model: nn.Module) -> str:
    """The number of elements of all parameters, and a hash of names, shapes, dtypes, ties and of
    which are trained; not of values."""
    lines = [
        f"{name} {param.dtype} {list(param.shape)} {param.requires_grad}"
        for name, param in model.named_parameters()
    ]
    lines += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    lines += [f"{name} {x.dtype} {list(x.shape)}" for name, x in model.named_buffers()]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    return f"{sum(p.numel() for p in model.parameters())} numbers, {digest}"


def modes(model: nn.Module) -> dict[str, str]:
    """Which modules train, and which parameters are trained, in the order of their names."""
    return {
        "training modes": _runs(module.training for module in model.modules()),
        "trainable parameters": _runs(param.requires_grad for param in model.parameters()),
    }


def digest_values(leaves: Iterable[Any]) -> str:
    """A hash of the values of the tensors among `leaves`; of those on meta there are none."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            flat = leaf.detach().to("cpu").contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _runs(flags: Iterable[bool]) -> str:
    """`3 yes, 1 no, 2 yes`."""
    runs = ((flag, len(list(run))) for flag, run in groupby(flags))
    return ", ".join(f"{count} {'yes' if flag else 'no'}" for flag, count in runs)


class Late:
    """Numbers that a device computes, read one call later: waiting for the device at every call
    takes too long."""

    def __init__(self) -> None:
        self._before: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, values: Tensor) -> Tensor | None:
        """The values of the previous call, on the host; None at the first."""
        before = self._before
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._before = host, event
        if before is None:
            return None
        before[1].synchronize()
        return before[0]


class BatchDigest:
    """A digest of the values of a call's tensors, as a number; on a GPU, of the previous call's."""

    def __init__(self) -> None:
        self._late = Late()

    def __call__(self, tensors: Sequence[Tensor]) -> int:
        if not tensors:
            return 0
        with torch.no_grad():
            value = bits_digest([w for x in tensors for w in _words(x)])
        if value.device.type == "cpu":
            return int(value)
        before = self._late(value)
        return 0 if before is None else int(before)


_ROW = 1 << 14
_SLICE_ROWS = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(x: Tensor) -> Tensor:
    """A number that stands for the bits of a tensor's values, as a tensor of int64."""
    return bits_digest(_words(x))


def signed_sum(x: Tensor) -> Tensor:
    """The sum of floating point numbers, each with a random sign of its place, the same on all
    ranks; at least in float32."""
    signs = _signs(x.device, torch.promote_types(x.dtype, torch.float32))
    return _weighted_sum(x.reshape(-1), signs)


def bits_digest(parts: Sequence[Tensor]) -> Tensor:
    """A number that stands for integers of 64 bits, or fewer, in several tensors."""
    weights = _weights(parts[0].device)
    return _weighted_sum(torch.stack([_weighted_sum(x, weights) for x in parts]), weights)


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a tensor as integers of 64 bits, and the smaller ones that are left over."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view(_INTEGERS[flat.itemsize])
    if flat.data_ptr() % 8:
        flat = flat.clone()
    end = flat.numel() - flat.numel() % (8 // flat.itemsize)
    return flat[:end].view(torch.int64), flat[end:]


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """A sum of `values`, each by a weight of its place, in the dtype of `weights`: of integers
    modulo 2**64. Temporaries are of the size of a slice, whatever that of the tensor is."""
    if values.numel() <= _ROW:
        return (values * weights[: values.numel()]).sum()
    num_rows = values.numel() // _ROW
    rows, rest = values[: num_rows * _ROW].view(num_rows, _ROW), values[num_rows * _ROW :]
    sums = [(part * weights).sum(1) for part in rows.split(_SLICE_ROWS)]
    return _weighted_sum(torch.cat([*sums, _weighted_sum(rest, weights).reshape(1)]), weights)


@cache
def _weights(device: torch.device) -> Tensor:
    """Random odd numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_ROW,), generator=generator, device="cpu")
    return (2 * numbers + 1).to(device)


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random signs, the same on every rank."""
    return torch.where(_weights(device) > 0, 1, -1).to(dtype)
