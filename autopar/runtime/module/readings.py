"""What a script reads of DTensors, prints of them and writes to files: all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.checkpoint.files import write_whole
from autopar.runtime.dtensor_private import take_over_readings
from autopar.runtime.process.alone import is_in_shards
from autopar.runtime.program.reads_whole import storage_of_piece
from autopar.runtime.program.sharded import whole_of


def know_readings(is_ours: Callable[[Any], bool]) -> None:
    """From now on DTensors that `is_ours` is true of are whole where a script looks. A collective
    call of all ranks where they are in shards."""

    def whole(x: DTensor) -> Tensor | None:
        if not is_ours(x):
            return None
        found = whole_of(x)
        is_param = isinstance(x, nn.Parameter)
        return nn.Parameter(found.detach(), x.requires_grad) if is_param else found

    def storage_of(piece: Tensor, x: DTensor) -> torch.UntypedStorage:
        return storage_of_piece(piece, in_shards=is_ours(x) and is_in_shards(x))

    take_over_readings(whole)
    write_whole(whole, storage_of)
