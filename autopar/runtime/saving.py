"""The whole model in the memory of one rank, and from there into files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.agreement import Agreement
from autopar.runtime.doors import local_store
from autopar.runtime.world import World

_SERIAL = itertools.count()


def gather_on_rank_0(tensors: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Each DTensor as the whole tensor, on the CPU of rank 0; the other ranks end with nothing.

    Tensors of several names stay one. One whole tensor at a time is on the device. A collective
    call.
    """
    found: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for name, value in tensors.items():
        if id(value) not in made:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            made[id(value)] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
        if world.rank == 0:
            found[name] = made[id(value)]
        else:
            made[id(value)] = None
    return found


def save_pretrained(
    model: nn.Module, world: World, directory: str | os.PathLike[str], **options: Any
) -> None:
    """`model.save_pretrained(directory, **options)` of `transformers`, by rank 0, with the tensors
    of all ranks. A collective call; if rank 0 cannot write, every rank raises."""
    save: Any = model.save_pretrained
    if world.size == 1:
        save(directory, **options)
        return
    state = gather_on_rank_0(model.state_dict(keep_vars=True), world)
    name = f"save/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_SERIAL)}"
    agreement = Agreement(world.store or local_store(), world.rank, world.size, name=name)

    def write() -> bytes:
        save(directory, state_dict=state, **options)
        return b""

    agreement.share("files", write)
