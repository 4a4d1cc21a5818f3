"""The arguments of `compile` and `plan` as people write them: taken where their meaning is clear,
an ArgumentError that says what to write where it is not."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.cluster.parsing import parse_cluster
from autopar.errors import ArgumentError, AutoparError, ClusterError
from autopar.ir.mesh import Cluster
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.process.world import device_of, look
from autopar.runtime.torch_private import without_dynamo

ClusterLike = Cluster | str | os.PathLike[str] | int

Given = ParamSpec("Given")
_Result = TypeVar("_Result")

_NODE = 8
"""More devices are hardly ever in one node, so that their number alone says too little."""


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """ArgumentError, naming what comes close, on a keyword that `what` does not take."""
    names = list(known)
    for name in given:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f": did you mean {close[0]}?" if close else "."
            raise ArgumentError(f"{what} takes no {name}{hint} It takes {', '.join(names)}")


def told(function: Callable[Given, _Result]) -> Callable[Given, _Result]:
    """`function`, of autopar, with `check_keywords` before it is called."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> _Result:
        check_keywords(f"autopar.{function.__name__}", kwargs, known)
        return function(*args, **kwargs)

    return call


def read_model(model: Any) -> nn.Module:
    """The plain model; that of `torch.compile`, if it went through it. AutoparError if it is
    compiled already, or wrapped."""
    if isinstance(model, CompiledModule):
        raise AutoparError("the model is compiled already: give autopar.compile the plain model")
    if isinstance(model, DataParallel | DistributedDataParallel):
        wrapper = type(cast(object, model)).__name__
        raise AutoparError(
            f"the model is wrapped in {wrapper}, which autopar takes the place of: "
            "give autopar.compile the plain model, its .module"
        )
    if not isinstance(model, nn.Module):
        said = f"the class {model.__name__}" if isinstance(model, type) else _kind(model)
        raise ArgumentError(f"model is {said}: give a torch.nn.Module that was made")
    return without_dynamo(model)


def read_cluster(cluster: ClusterLike | None, model: nn.Module) -> Cluster | None:
    """The cluster: as it is, as `parse_cluster` reads it, or so many of the devices at hand, one
    node of them; None for all that run."""
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
