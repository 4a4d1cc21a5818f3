"""The parameters of a compiled model: replicated DTensors first, their sharded selves once planned.

A parameter keeps its name and its ties. It keeps its identity too when it is sharded, by
`torch.utils.swap_tensors`, so that an optimizer made in between stays valid. In a world of one,
parameters stay as they are. Buffers stay plain tensors, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.runtime.world import Groups, World, param_placements
from autopar.sharding import Sharding


def check(model: nn.Module) -> None:
    """AutoparError if a parameter cannot be handed out: no values yet, or distributed already."""
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param) or param.is_meta:
            raise AutoparError(
                f"parameter {name} has no values yet: initialise the model before autopar.compile"
            )
        if isinstance(param, DTensor):
            raise AutoparError(
                f"parameter {name} is a DTensor already: give autopar.compile the plain model, and "
                "only once"
            )


def replicate(model: nn.Module, world: World) -> None:
    """Move the model to the device of `world`; with several ranks, make each parameter a replicated
    DTensor with the values of rank 0, and each buffer equal to that of rank 0. A collective call.
    """
    model.to(world.device)
    mesh = world.device_mesh
    if mesh is None:
        return
    places = list(_places(model))
    made: dict[int, nn.Parameter] = {}
    for module, name, param in places:
        if id(param) not in made:
            whole = distribute_tensor(param.detach().contiguous(), mesh, [Replicate()])
            made[id(param)] = _parameter(whole, param)
        module._parameters[name] = made[id(param)]
    for buffer in model.buffers():
        if isinstance(buffer, DTensor):
            raise AutoparError("a buffer of the model is a DTensor: autopar.compile needs it plain")
        dist.broadcast(buffer, src=0)


def shard(model: nn.Module, groups: Groups, storage: Mapping[str, Sharding]) -> None:
    """Store each replicated parameter as `storage` says of its name, keeping its identity.

    Every rank cuts its piece from the copy it holds: nothing is sent.
    """
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            raise AutoparError(f"parameter {name} was replaced after autopar.compile")
        whole = param.to_local().detach()
        wanted = param_placements(storage[name])
        piece = distribute_tensor(whole, groups.params, wanted, src_data_rank=None)
        _swap(name, param, _parameter(_own_memory(piece, groups.params, wanted), param))


def _own_memory(piece: DTensor, mesh: DeviceMesh, wanted: Sequence[Placement]) -> DTensor:
    """The same DTensor over a copy of its local part, so that the whole can be freed."""
    return DTensor.from_local(
        piece.to_local().clone(memory_format=torch.contiguous_format),
        mesh,
        wanted,
        run_check=False,
        shape=piece.shape,
        stride=piece.stride(),
    )


def _swap(name: str, param: Tensor, new: Tensor) -> None:
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        raise AutoparError(
            f"parameter {name} is in use and cannot be sharded ({error}): drop tensors computed "
            "from it, such as an earlier loss, before the first call"
        ) from error


def _parameter(data: DTensor, like: Tensor) -> nn.Parameter:
    new = nn.Parameter(data, requires_grad=like.requires_grad)
    vars(new).update(vars(like))
    return new


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter; tied ones have several."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield module, name, param
