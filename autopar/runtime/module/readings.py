"""What a script reads of DTensors, prints of them and writes to files: all of them. And what its
metrics have seen."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache, wraps
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
from autopar.runtime.torch_private import flatten

# Files that a script writes itself: they hold whole tensors of what ranks have in shards.
#
# `torch.save` and `save_file` of safetensors, which peft and others save by, take the state dict of
# a compiled model as that of a plain one. A collective call of all ranks, each of which writes.
# Where all write to one path, as a script of one device does, what is there is at any time the file
# of one of them: a rank that reads it while others write finds no part of one.
# `tests/runtime/test_files.py` holds what is relied on of safetensors' internals.

_WholeOf = Callable[[DTensor], Tensor | None]
"""All of a DTensor, plain; None of one that is not the concern of autopar."""


def write_whole(
    whole: _WholeOf, storage_of: Callable[[Tensor, DTensor], torch.UntypedStorage]
) -> None:
    """From now on DTensors are `whole` in files, and those that `torch.save` writes to a path take
    the place of another when they are complete. `storage_of` a piece is that of a DTensor."""
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
    """`torch.save` that writes beside the path that it is given, under the same name (which is part
    of what it writes), and puts that in the place of what was there."""

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
"""What safetensors hands the tensors of a file to, in one release or another."""


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
    """From now on DTensors that `is_ours` is true of are whole where a script looks. A collective
    call of all ranks where they are in shards."""

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
# torchmetrics adds up, or joins, what ranks have seen, as each has other rows under
# DistributedDataParallel. Of a compiled model with global inputs every rank has the outputs of the
# whole batch: 12 rows on two ranks would count as 24. Where the states of a metric are the same on
# all ranks they are those of all rows, and stay as they are.


def know_metrics() -> None:
    """From now on metrics are as said above, if the script has imported torchmetrics."""
    if "torchmetrics" in sys.modules:
        _take_over_sync()


@cache
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
    """Whether all ranks have the same, or this one asks alone, who then goes by what it has."""
    with jointly("torchmetrics.Metric.sync", ()) as joint:
        if not joint:
            return True
        number = int(digest_values(flatten(states)[0]), 16) >> 1
        device = "cuda" if dist.get_backend(own_group()) == "nccl" else "cpu"
        mine = torch.tensor([number, -number], device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=own_group())
        most, least = mine.tolist()
        return most == -least
