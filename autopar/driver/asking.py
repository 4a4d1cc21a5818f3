"""From a model and a request to the plan for it: trace, settle what is imposed, search."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.cluster.parsing import checked, parse_cluster
from autopar.cluster.profile import Profile
from autopar.cost_model.measured import device_from_profile
from autopar.driver.margin import search_with_margin
from autopar.driver.search import search
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster
from autopar.plans.compatibility import undivided_batch
from autopar.plans.matching import matches, settle, unmatched
from autopar.plans.options import Options
from autopar.plans.plan import Plan, Structure
from autopar.plans.request import Asked
from autopar.runtime.module.aliases import aliases
from autopar.runtime.module.building import split_inputs
from autopar.tracer import Traced, Wanted, only_losses, trace


def ask(
    model: nn.Module, inputs: Any, cluster: Cluster, options: Options, margin: bool = False
) -> Asked:
    """The model, traced, and all else that decides the plan for it."""
    args, kwargs = split_inputs(inputs)
    traced = trace_for_training(model, args, kwargs, options)
    check_outputs(traced, options)
    return Asked(traced.graph, cluster, settled(traced, model, args, kwargs, options), margin)


def answer(asked: Asked, progress: Callable[[str], None]) -> Plan:
    """The best plan, with its margin if that is asked for."""
    return find_plan(asked.graph, asked.cluster, asked.options, progress, asked.margin)


def trace_for_training(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    wanted: Wanted = only_losses,
) -> Traced:
    """The graph with its backward part wherever a parameter is trained, though the call may be
    under `torch.no_grad`: a model is stored in one way, and training decides which. Outputs that
    `options` or `wanted` ask for have gradients beside the losses."""
    trained = any(param.requires_grad for param in model.parameters())
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        return trace(
            model,
            args,
            kwargs,
            strict=options.strict,
            name=type(model).__name__,
            wanted=lambda position, name: (
                options.wants_gradient(position, name) or wanted(position, name)
            ),
        )


def planned_gradients(structure: Structure) -> Wanted:
    """Which outputs have gradients in the graph that a plan is for: those it does not return
    without."""
    detached = {int(key.partition(":")[2].partition("~")[0]) for key in structure.outputs}
    return lambda position, _name: position not in detached


def check_outputs(traced: Traced, options: Options) -> None:
    """ConstraintError, naming what comes close, if an output is asked for that there is not."""
    names = [leaf.name for leaf in traced.outputs if leaf.item is not None]
    positions = [str(i) for i, leaf in enumerate(traced.outputs) if leaf.item is not None]
    for pattern in options.differentiable_outputs:
        if not any(matches(pattern, name) for name in (*names, *positions)):
            raise ConstraintError(
                f"differentiable_outputs: {unmatched(traced.graph.name, pattern, names)}"
            )


def settled(
    traced: Traced,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Options:
    """`options` with constraints that speak of what `traced` has."""
    known = aliases(model, args, kwargs)
    known |= {f"output:{i}": leaf.name for i, leaf in enumerate(traced.outputs)}
    return replace(options, constraints=settle(traced.graph, options.constraints, known))


def find_plan(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    progress: Callable[[str], None],
    margin: bool = False,
) -> Plan:
    """The best plan for `graph`. InfeasibleError if none fits in memory, with what may help."""
    find = search_with_margin if margin else search
    try:
        return find(
            graph, cluster, options, torch_version=str(torch.__version__), progress=progress
        )
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{undivided_batch(graph, cluster.num_devices)}") from error


def describe_cluster(
    cluster: Cluster | str, profile: Profile | str | os.PathLike[str] | None
) -> Cluster:
    """The cluster, with the ceilings of the profile in place of datasheets."""
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if profile is None:
        return checked(found, f"cluster {found.name}")
    measured = profile if isinstance(profile, Profile) else Profile.load(profile)
    device = device_from_profile(measured, found.device)
    return checked(replace(found, device=device), f"cluster {found.name} with its profile")
