"""The arguments of `compile` and `plan` as people write them: read where their meaning is clear.
Where it is not, an ArgumentError says what to write."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.cluster.parsing import parse_cluster
from autopar.errors import ArgumentError, AutoparError, ClusterError, OldNameWarning
from autopar.ir.mesh import Cluster
from autopar.plans.requests.plan_options import check_known, in_groups
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.process.world import device_of, look
from autopar.runtime.torch_private import without_dynamo

ClusterLike = Cluster | str | os.PathLike[str] | int

Given = ParamSpec("Given")
_Result = TypeVar("_Result")

_NODE = 8
"""Devices of a usual node. A node hardly ever has more, so a larger number says too little."""


def with_old_names(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` to `what`, with ungrouped names of old options moved into their groups. An
    OldNameWarning about each points at the caller's caller."""
    grouped, old = in_groups(given)
    for before, field in old.items():
        now = f'{field.group}={{"{field.name}": ...}}'
        text = f"{what}: {before} goes with the next release: write {now}"
        warnings.warn(OldNameWarning(text), stacklevel=3)
    return grouped


def with_checked_options(function: Callable[Given, _Result]) -> Callable[Given, _Result]:
    """`function`, of autopar, with `check_known` before each call, and with ungrouped names of old
    options moved into their groups."""
    known = list(inspect.signature(function).parameters)
    name = f"autopar.{function.__name__}"

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> _Result:
        anew: Any = with_old_names(name, kwargs)
        check_known(name, anew, known)
        result: _Result = cast(Any, function)(*args, **anew)
        return result

    return call


def read_model(model: Any) -> nn.Module:
    """The plain model: without the wrapper of `torch.compile`, if it has one. AutoparError if it is
    compiled already, or wrapped otherwise."""
    if isinstance(model, CompiledModule):
        raise AutoparError("the model is compiled already: give autopar.compile the plain model")
    if isinstance(model, DataParallel | DistributedDataParallel):
        wrapper = type(cast(object, model)).__name__
        raise AutoparError(
            f"the model is wrapped in {wrapper}, which autopar takes the place of: "
            "give autopar.compile the plain model, its .module"
        )
    if not isinstance(model, nn.Module):
        description = f"the class {model.__name__}" if isinstance(model, type) else _kind(model)
        raise ArgumentError(f"model is {description}: give a torch.nn.Module that was made")
    return without_dynamo(model)


def read_cluster(cluster: ClusterLike | None, model: nn.Module) -> Cluster | None:
    """The cluster: a Cluster as it is, text as `parse_cluster` reads it, or a number of the local
    devices as one node. None for all devices that run."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    given: Any = cluster
    if isinstance(given, bool) or not isinstance(given, str | os.PathLike | int):
        raise ArgumentError(
            f"cluster is {_kind(given)}: write the devices as text (8xH100), the path of a TOML "
            "file, an autopar Cluster, or how many of the devices at hand"
        )
    if not isinstance(cluster, int):
        return parse_cluster(cluster)
    world = look(device_of(model))
    if cluster == world.size:
        return None
    device = parse_cluster(world.preset).device
    if device.kind != "cpu" and cluster > max(_NODE, world.local_size or 1):
        raise ClusterError(
            f"cluster={cluster} does not say how {cluster} devices are joined: write "
            f'"{cluster // _NODE}x{_NODE}x{device.name}" for nodes of {_NODE}'
        )
    return parse_cluster(f"{cluster}x{device.name}")


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
