"""The whole model in the memory of one rank, and from there into files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.process.agreement import make_agreement
from autopar.runtime.process.reading import start_reading
from autopar.runtime.process.world import World


def gather_on_rank_0(tensors: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Each DTensor as the whole tensor, on the CPU, on rank 0; an empty dict on every other `rank`.

    Tied tensors stay one. One whole tensor at a time is on the device. A collective call.
    """
    gathered: dict[str, Any] = {}
    wholes: dict[int, Any] = {}
    for name, value in tensors.items():
        if id(value) not in wholes:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            wholes[id(value)] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
        if rank == 0:
            gathered[name] = wholes[id(value)]
        else:
            wholes[id(value)] = None
    return gathered


class Library:
    """The parameters of a model, which each rank can read whole without the others."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model = model
        self._reader = start_reading(world) if world.size > 1 else None
        if self._reader is not None:
            self._reader.saves = True

    def whole(self, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """A `state_dict()` of the model with whole tensors, on the CPU, for DTensors. Tied tensors
        stay one."""
        if self._reader is None:
            return state
        params = dict(self._model.named_parameters(remove_duplicate=False))
        names = self._reader.names()
        wholes: dict[int, Tensor] = {}
        for full_name, value in state.items():
            name = full_name.removeprefix(prefix)
            if not isinstance(value, DTensor) or name not in params:
                continue
            param = params[name]
            if id(param) not in wholes:
                wholes[id(param)] = self._reader.whole(names[id(param)], param)
            state[full_name] = wholes[id(param)]
        return state


def save_alone(
    model: nn.Module,
    world: World,
    whole: Callable[[], Mapping[str, Any]],
    directory: str | os.PathLike[str],
    **options: Any,
) -> None:
    """`model.save_pretrained(directory, **options)` by this rank, if it is the main process: rank 0
    unless `options` say otherwise."""
    if options.get("is_main_process", world.rank == 0):
        if options.get("state_dict") is None:
            options["state_dict"] = whole()
        save: Any = model.save_pretrained
        save(directory, **options)


def save_pretrained(
    model: nn.Module, world: World, directory: str | os.PathLike[str], **options: Any
) -> None:
    """`model.save_pretrained(directory, **options)` of `transformers`, by rank 0, with the tensors
    of all ranks. A collective call; if rank 0 cannot write, every rank raises."""
    save: Any = model.save_pretrained
    if world.size == 1:
        save(directory, **options)
        return
    with world.working("save_pretrained"):
        state = gather_on_rank_0(model.state_dict(keep_vars=True), world.rank)

    def write() -> bytes:
        save(directory, state_dict=state, **options)
        return b""

    make_agreement(world).share("files", write)
