"""Reading, printing and saving of DTensors: a script gets whole tensors. And the states of its
metrics."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor_private import take_over_pickling, take_over_readings
from autopar.runtime.process.alone import is_in_shards, jointly
from autopar.runtime.process.digests import digest_values
from autopar.runtime.process.own_group import own_group
from autopar.runtime.program.reads_whole import storage_of_shard
from autopar.runtime.program.sharded import whole_of
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import flatten

# Files that a script writes itself: they hold whole tensors in place of shards.
#
# `torch.save` and safetensors' `save_file`, by which peft and others save, take the state dict of a
# compiled model as that of a plain one. It is a collective call of all ranks, each of which writes.
# If all write to one path, as a script of one device does, the path always has the complete file of
# one of them. So a rank that reads it while others write finds no partial file.
# `tests/runtime/test_files.py` checks the internals of safetensors that this relies on.

_WholeOf = Callable[[DTensor], Tensor | None]
"""All of a DTensor, as a plain tensor; None for a DTensor that is not autopar's."""


def write_whole(
    whole: _WholeOf, storage_of: Callable[[Tensor, DTensor], torch.UntypedStorage]
) -> None:
    """From now on files have `whole` in place of a DTensor, and a file that `torch.save` writes to
    a path replaces the previous one once it is complete. `storage_of` a shard stands for a
    DTensor's storage."""
    take_over_pickling(whole, storage_of)
    torch.save = in_one_piece(torch.save)
    try:
        from safetensors import torch as library
    except ImportError:
        return
    module: Any = library
    for name in _TAKERS:
        if hasattr(module, name):
            setattr(module, name, _taking(getattr(module, name), whole))


def in_one_piece(save: Callable[..., None]) -> Callable[..., None]:
    """`torch.save` that writes to a new directory beside its path and then replaces the file there.
    The name stays, since it is part of the content."""

    @wraps(save)
    def save_beside(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(os.path.realpath(f)) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.parent.is_dir() or (path.exists() and not path.is_file()):
            return save(obj, f, *args, **kwargs)
        try:
            folder = tempfile.mkdtemp(prefix=".saving", dir=path.parent)
        except OSError:  # the folder may not be written to, though the file may
            return save(obj, f, *args, **kwargs)
        try:
            beside = Path(folder, path.name)
            save(obj, beside, *args, **kwargs)
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
        finally:
            shutil.rmtree(folder)

    return save_beside


_TAKERS = ("_flatten", "_flatten_as_ptr")
"""The functions to which safetensors passes the tensors of a file, in one release or another."""


def _taking(plain: Callable[..., Any], whole: _WholeOf) -> Callable[..., Any]:
    @wraps(plain)
    def take(tensors: Any, *args: Any) -> Any:
        if isinstance(tensors, dict):
            tensors = {name: _entire(x, whole) for name, x in tensors.items()}
        return plain(tensors, *args)

    return take


def _entire(x: Any, whole: _WholeOf) -> Any:
    entire = whole(x) if isinstance(x, DTensor) else None
    return x if entire is None else entire.detach().contiguous()


def know_readings(is_ours: Callable[[Any], bool]) -> None:
    """From now on a script reads DTensors that `is_ours` is true of as whole tensors: a collective
    call of all ranks if they are in shards."""

    def whole(x: DTensor) -> Tensor | None:
        if not is_ours(x):
            return None
        tensor = whole_of(x)
        is_param = isinstance(x, nn.Parameter)
        return nn.Parameter(tensor.detach(), x.requires_grad) if is_param else tensor

    def storage_of(shard: Tensor, x: DTensor) -> torch.UntypedStorage:
        return storage_of_shard(shard, in_shards=is_ours(x) and is_in_shards(x))

    take_over_readings(whole)
    write_whole(whole, storage_of)


# Metrics of torchmetrics on ranks that have all seen the same rows.
#
# torchmetrics adds up, or joins, the states of ranks, since each has other rows under
# DistributedDataParallel. With global inputs, every rank of a compiled model has the outputs of the
# whole batch: 12 rows on 2 ranks would count as 24. So states that are the same on all ranks are
# those of all rows, and are not synchronised.


def know_metrics() -> None:
    """From now on metrics behave as said above, if the script has imported torchmetrics."""
    if "torchmetrics" in sys.modules:
        _take_over_sync()


@once
def _take_over_sync() -> None:
    library: Any = sys.modules["torchmetrics"]
    plain = library.Metric.sync

    @wraps(plain)
    def sync(
        self: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if should_sync and dist.is_initialized() and _are_equal(self.metric_state):
            should_sync = False
        plain(self, dist_sync_fn, process_group, should_sync, distributed_available)

    library.Metric.sync = sync


def _are_equal(states: Any) -> bool:
    """Whether all ranks have the same states, or this rank calls alone, and so uses its own."""
    with jointly("torchmetrics.Metric.sync", ()) as joint:
        if not joint:
            return True
        number = int(digest_values(flatten(states)[0]), 16) >> 1
        device = "cuda" if dist.get_backend(own_group()) == "nccl" else "cpu"
        mine = torch.tensor([number, -number], device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=own_group())
        most, least = mine.tolist()
        return most == -least
