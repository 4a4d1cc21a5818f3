"""Short texts that stand for a model's parameters and for a batch, for ranks to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def param_types(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global shape and dtype name of each parameter, under its first name."""
    return {
        name: (tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for name, param in model.named_parameters()
    }


def digest_params(model: nn.Module) -> str:
    """How many numbers the parameters have, and a hash of names, shapes, dtypes, ties and of which
    are trained; not of values."""
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
    runs: list[tuple[bool, int]] = []
    for flag in flags:
        count = runs.pop()[1] if runs and runs[-1][0] == flag else 0
        runs.append((flag, count + 1))
    return ", ".join(f"{count} {'yes' if flag else 'no'}" for flag, count in runs)
