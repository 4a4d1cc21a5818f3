"""The parameters of a compiled model: replicated DTensors first, their sharded selves once planned.

A parameter keeps its name, its ties and its hooks. References to the plain parameter, such as an
optimizer's, are replaced by the DTensor (`identity`). That stays the same object when it is sharded
(`torch.utils.swap_tensors`), so optimizers may be made at any time. A parameter with values from a
checkpoint or an initialisation stays on the meta device until then. It never exists whole on a rank
that stores a shard of it. In a world of one, parameters are plain tensors. Buffers stay plain,
equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.weights import Sources
from autopar.runtime.dtensor_private import (
    cut_shard,
    dtensor_of,
    is_of,
    local_slices,
    parameter_of,
    shard_elsewhere,
)
from autopar.runtime.module.changes import know_changes
from autopar.runtime.module.identity import supersede
from autopar.runtime.module.optimizers import mark
from autopar.runtime.ops.host_copies import copy_on_host
from autopar.runtime.process.alone import know_ranks
from autopar.runtime.process.layouts import check_states
from autopar.runtime.process.moves import moves
from autopar.runtime.process.own_group import broadcast, know_bytes
from autopar.runtime.process.part_tensors import know_numbers
from autopar.runtime.process.world import ParamPlace, World
from autopar.runtime.program.guards import is_state
from autopar.runtime.program.sharded import whole_of
from autopar.runtime.torch_private import hand_hooks

_NAME = "_autopar_stored"
"""The attribute of a stored parameter that has the name it was stored under."""


def check_model(model: nn.Module) -> None:
    """AutoparError if a parameter cannot be sharded: it is lazy, distributed already, or in the
    memory of another one. The same if a parameter or buffer has a layout that programs do not
    take."""
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise AutoparError(
                f"parameter {name} has no shape yet: call the model once before autopar.compile"
            )
        if isinstance(param, DTensor):
            raise AutoparError(
                f"parameter {name} is a DTensor already: give autopar.compile the plain model, and "
                "only once"
            )
    check_states(model)
    check_memory(dict(model.named_parameters()))


def check_memory(params: Mapping[str, nn.Parameter]) -> None:
    """AutoparError if two of the plain parameters share memory: sharded separately, they would
    not."""
    spans = sorted(
        (param.data_ptr(), param.data_ptr() + param.nbytes, name)
        for name, param in params.items()
        if not isinstance(param, DTensor) and not param.is_meta and param.is_contiguous()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise AutoparError(
                f"parameters {name} and {other} are two that lie in the same memory: make them one "
                "(a.weight = b.weight), or clone() the second"
            )


def replicate(model: nn.Module, world: World, sources: Sources) -> None:
    """Move the model to the device of `world`. With several ranks, make each parameter a replicated
    DTensor with the values of rank 0, or without values if `sources` has them. Make each buffer
    equal to that of rank 0. With one rank, all get their values. A collective call.
    """
    mesh = world.device_mesh
    if mesh is not None:
        know_ranks(world, model)
        know_bytes()
        know_numbers()
        know_changes([mesh])
    supersede(tuple(_ready(model, world, mesh, sources)))
    buffers: dict[int, Tensor] = {}
    for table, leaf, name, buffer in list(buffer_places(model)):
        if id(buffer) not in buffers:
            given = sources.whole(name, buffer) if name in sources else buffer
            buffers[id(buffer)] = given.to(world.device)
        table[leaf] = buffers[id(buffer)]
    if mesh is not None:
        for buffer in buffers.values():
            broadcast(buffer)


def added_params(
    model: nn.Module, world: World, places: Mapping[str, ParamPlace]
) -> dict[str, nn.Parameter]:
    """The parameters, by name, that are not where the programs so far have them (`places`): they
    were added to the model since, or replaced others."""
    added: dict[str, nn.Parameter] = {}
    for name, param in model.named_parameters():
        if not isinstance(param, nn.Parameter):
            continue  # what a script has put there for a call
        place = places.get(stored_name(name, param))
        if place is None and not places and world.device_mesh is not None:
            place = ParamPlace(world.device_mesh, (Replicate(),))
        if not isinstance(param, DTensor) or (param.device_mesh, param.placements) != place:
            added[name] = param
    return added


def stored_name(name: str, param: Tensor) -> str:
    """The name of a parameter in the first programs. It may have another name by now, as after
    `torch.nn.utils.prune`."""
    return vars(param).get(_NAME, name)


def adopt(model: nn.Module, world: World, new: Mapping[str, nn.Parameter]) -> None:
    """Make each of the `new` parameters a replicated DTensor with the values of rank 0, and buffers
    that were computed from parameters whole. A collective call."""
    mesh = world.device_mesh
    assert mesh is not None
    check_memory(new)
    plain: list[tuple[str, nn.Parameter, nn.Parameter]] = []
    for name, param in new.items():
        if param.is_meta:
            raise AutoparError(f"parameter {name} is new to the model and has no values")
        if isinstance(param, DTensor):
            whole = _parameter(param.full_tensor(), param)
            whole.grad = None if param.grad is None else whole_of(param.grad)
            _swap(name, param, _replicated(name, whole, world, mesh, Sources()))
        else:
            plain.append((name, param, _replicated(name, param, world, mesh, Sources())))
    supersede(plain)
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for leaf, buffer in list(table.items()):
                if isinstance(buffer, DTensor) and not buffer.requires_grad:
                    table[leaf] = buffer.full_tensor()


def _ready(
    model: nn.Module, world: World, mesh: DeviceMesh | None, sources: Sources
) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Each parameter under its first name, with the DTensor that is to take its place; with one
    process, parameters get their values where they are."""
    for name, param in model.named_parameters():
        if mesh is not None:
            yield name, param, _replicated(name, param, world, mesh, sources)
        elif name in sources:
            _swap(name, param, _parameter(sources.whole(name, param).to(world.device), param))
        else:
            param.data = param.data.to(world.device)


def _replicated(
    name: str, param: nn.Parameter, world: World, mesh: DeviceMesh, sources: Sources
) -> nn.Parameter:
    """The parameter as it is before a plan says how to store it."""
    if name in sources:
        data = torch.empty_like(param, device="meta")
    else:
        data = param.detach().to(world.device).contiguous()
        if data.data_ptr() == param.data_ptr():
            data = data.clone()
        broadcast(data)
    new = _parameter(DTensor.from_local(data, mesh, [Replicate()], run_check=False), param)
    # An optimizer's step may call the model for the first time.
    mark(new)
    if param.grad is not None:
        new.grad = distribute_tensor(param.grad.to(world.device), mesh, [Replicate()])
    return new


def shard_parameters(
    model: nn.Module,
    places: Mapping[str, ParamPlace],
    sources: Sources,
    params_on_host: Collection[str] = (),
) -> None:
    """Shard each replicated parameter to its place, by name; it stays the same object. Those that
    are there already are left alone. `params_on_host` go to the memory of the device's host. A rank
    outside of a parameter's mesh has nothing of it.

    Every rank cuts its shard from the copy it holds, or gets it from `sources`: nothing is sent.
    """
    moves.begin()
    know_changes(place.mesh for place in places.values())
    for name, param in model.named_parameters():
        if not isinstance(param, nn.Parameter):
            continue  # what a script has put there for a call
        assert isinstance(param, DTensor)
        place = places[name]
        if (param.device_mesh, param.placements) == place and not param.is_meta:
            continue
        whole = param.to_local().detach()
        if not is_of(place.mesh):
            shard = shard_elsewhere(whole, place.mesh.device_type)
        elif not whole.is_meta:
            # A copy, so that the whole can be freed.
            shard = cut_shard(whole, *place).clone(memory_format=torch.contiguous_format)
        else:
            shard = sources.read(name, local_slices(param.shape, *place)).to(place.mesh.device_type)
        new = _parameter(_stored(name, shard, param, place, params_on_host), param)
        if isinstance(param.grad, DTensor):
            grad = cut_shard(param.grad.to_local(), *place)
            grad = grad.clone(memory_format=torch.contiguous_format)
            new.grad = _stored(name, grad, param, place, params_on_host)
        vars(new)[_NAME] = name
        _swap(name, param, new)
    moves.end()


def bring_to_host(model: nn.Module, params_on_host: Collection[str]) -> None:
    """Store parameters of a world of one in the memory of the device's host."""
    for name, param in model.named_parameters():
        if name in params_on_host:
            param.data = copy_on_host(param.detach())
            mark(param)
            param.grad = None if param.grad is None else copy_on_host(param.grad)


def _stored(
    name: str,
    shard: Tensor,
    like: Tensor,
    place: ParamPlace,
    params_on_host: Collection[str],
) -> DTensor:
    """This rank's shard of a parameter, or of its gradient, as a DTensor."""
    return dtensor_of(copy_on_host(shard) if name in params_on_host else shard, like, *place)


def check_ties(model: nn.Module, values: Mapping[str, Any]) -> None:
    """AutoparError if a parameter has several names, and `values` for more than one of them."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name not in values:
            continue
        known = names.setdefault(id(param), name)
        if known != name:
            raise AutoparError(
                f"load_state_dict(assign=True) would make two parameters in one memory of {known} "
                f"and {name}, which are tied: leave assign=True out"
            )


def as_stored(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by name, for `load_state_dict`: whole tensors as DTensors with this rank's shard. A
    parameter without values gets memory for all of them at once."""
    params = dict(model.named_parameters(remove_duplicate=False))
    stored: dict[str, Any] = {}
    for name, value in values.items():
        param = params.get(name)
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if isinstance(param, DTensor) and plain and value.shape == param.shape:
            if param.is_meta:
                data = torch.empty_like(param.to_local(), device=param.device_mesh.device_type)
                whole = DTensor.from_local(
                    data, param.device_mesh, param.placements, run_check=False
                )
                _swap(name, param, _parameter(whole, param))
            shard = cut_shard(value, param.device_mesh, param.placements)
            shard = shard.to(param.to_local().device)
            value = dtensor_of(shard, param, param.device_mesh, param.placements)
        stored[name] = value
    return stored


def _swap(name: str, param: Tensor, new: Tensor) -> None:
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        raise AutoparError(
            f"parameter {name} is in use and cannot be sharded ({error}): drop tensors computed "
            "from it, such as an earlier loss, before the first call"
        ) from error


def _parameter(data: Tensor, like: Tensor) -> nn.Parameter:
    new = parameter_of(data, requires_grad=like.requires_grad)
    vars(new).update(vars(like))
    hand_hooks(like, new)
    return new


def buffer_places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Tensor]]:
    """Every place that holds a buffer, or a tensor that is a plain attribute, with its name there.
    A tensor may have several places."""
    return (
        (table, leaf, f"{path}.{leaf}" if path else leaf, buffer)
        for path, module in model.named_modules()
        for table in (module._buffers, vars(module))
        for leaf, buffer in table.items()
        if isinstance(buffer, Tensor) and is_state(buffer)
    )
