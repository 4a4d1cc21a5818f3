"""Files that a script writes itself: they hold whole tensors of what ranks have in shards.

`torch.save` and `save_file` of safetensors, which peft and others save by, take the state dict of a
compiled model as that of a plain one. A collective call of all ranks, each of which writes.
`tests/runtime/test_files.py` holds what is relied on of safetensors' internals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor_private import take_over_pickling

_WholeOf = Callable[[DTensor], Tensor | None]
"""All of a DTensor, plain; None of one that is not the concern of autopar."""


def write_whole(whole: _WholeOf) -> None:
    """From now on DTensors are `whole` in files."""
    take_over_pickling(whole)
    try:
        from safetensors import torch as library
    except ImportError:
        return
    module: Any = library
    for name in _TAKERS:
        if hasattr(module, name):
            setattr(module, name, _taking(getattr(module, name), whole))


_TAKERS = ("_flatten", "_flatten_as_ptr")
"""What safetensors hands the tensors of a file to, in one release or another."""


def _taking(plain: Callable[..., Any], whole: _WholeOf) -> Callable[..., Any]:
    @wraps(plain)
    def take(tensors: Any, *args: Any) -> Any:
        if isinstance(tensors, dict):
            tensors = {name: _entire(x, whole) for name, x in tensors.items()}
        return plain(tensors, *args)

    return take


def _entire(x: Any, whole: _WholeOf) -> Any:
    found = whole(x) if isinstance(x, DTensor) else None
    return x if found is None else found.detach().contiguous()
