"""Whether a stored plan fits a model and its inputs, and if not, what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import gcd

from autopar.errors import ArgumentError, PlanMismatchError, listed
from autopar.ir.graph import Graph, Role
from autopar.ir.input_sharding import describe_inputs
from autopar.ir.mesh import Cluster
from autopar.ir.units import format_count
from autopar.plans.pipeline_orders import IN_CHUNKS
from autopar.plans.requests.options import Options
from autopar.plans.structure import Structure

ParamTypes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype name of each parameter, by its name."""


def check_world(structure: Structure, world_size: int) -> None:
    """PlanMismatchError if the plan is for another number of devices."""
    num_devices, ranks = structure.num_devices, structure.num_ranks
    if num_devices != world_size:
        where = f"mesh {structure.mesh_text}" + f" of each of {ranks} ranks" * (ranks > 1)
        raise PlanMismatchError(
            f"the plan is for {format_count(num_devices, 'device')} ({where}), but "
            f"{format_count(world_size, 'process')} run: start {num_devices} with torchrun, or "
            f"plan again for {world_size}"
        )


def check_cluster(cluster: Cluster, world_size: int) -> None:
    """PlanMismatchError if the cluster has another number of devices."""
    if cluster.num_devices != world_size:
        raise PlanMismatchError(
            f"cluster {cluster.name} has {format_count(cluster.num_devices, 'device')}, but "
            f"{format_count(world_size, 'process')} run: start one process per device with "
            "torchrun, or leave out cluster= to use what is there"
        )


def stored_options(options: Options, structure: Structure) -> Options:
    """The options for calls of a model that its stored plan is not for.

    What `options` leave open is as in the plan. ArgumentError, with both values, if they request
    another number of stages, microbatches or loss chunks, other cuts, another schedule, or another
    dtype of saved activations.
    """
    count, chunks = structure.microbatches, structure.loss_chunks
    saved_dtype = structure.stages[0].saved_dtype
    stored = replace(options.in_stages_of(structure), microbatches=count)
    usual = {"auto": "", **{name: f"{name}:2" for name in IN_CHUNKS}}
    schedule = "\n".join(structure.schedule_rows) or structure.schedule
    for name, requested, planned in (
        ("pipeline.stages", options.stages, len(structure.stages)),
        ("pipeline.cuts", ", ".join(options.cuts), ", ".join(stored.cuts)),
        ("pipeline.schedule", usual.get(options.schedule, options.schedule), schedule),
        ("microbatches", options.microbatches, count),
        ("memory.loss_chunks", options.loss_chunks, chunks),
        ("memory.saved_dtype", options.saved_dtype, saved_dtype),
    ):
        if requested and requested != planned:
            raise ArgumentError(
                f"{name}={requested!r}: the plan has {planned or 'none'}, and is applied as it is: "
                f"leave {name} out, or plan again with it"
            )
    return replace(stored, loss_chunks=chunks, saved_dtype=saved_dtype)


def check_params(structure: Structure, params: ParamTypes) -> None:
    """PlanMismatchError, naming them, if the model's parameters are not those of the plan. External
    ones, which are the script's, do not count."""
    _refuse(structure, _param_differences(structure, params, external=False))


def check_fit(structure: Structure, graph: Graph, fingerprint: str) -> None:
    """PlanMismatchError, field by field, unless the plan was made for this very graph."""
    if structure.fingerprint == fingerprint:
        return
    params = {
        node.target: (node.outputs[0].shape, node.outputs[0].dtype)
        for node in graph.with_role(Role.PARAM)
    }
    differences = _param_differences(structure, params)
    differences += _input_differences(structure, graph)
    ops = {node.key: node.op for node in graph.with_role(Role.OP) if not node.view}
    if not structure.is_pipeline:  # Several stages have other ops than the model alone.
        differences += _one_sided("ops", ops, structure.only.ops)
    if not differences:
        differences = [
            f"the same ops are joined otherwise (fingerprint {structure.fingerprint} in the plan, "
            f"{fingerprint} of the model)"
        ]
    _refuse(structure, differences)


def undivided_batch(graph: Graph, num_devices: int) -> str:
    """A sentence on an input whose batch the devices cannot share; empty if there is none."""
    for node in graph.with_role(Role.INPUT):
        shape = node.outputs[0].shape
        if len(shape) > 1 and num_devices > 1 and gcd(shape[0], num_devices) < num_devices:
            return (
                f". The batch cannot be spread over all devices: dim 0 of input {node.target} is "
                f"{shape[0]}, which {num_devices} does not divide"
            )
    return ""


def _param_differences(
    structure: Structure, params: ParamTypes, *, external: bool = True
) -> list[str]:
    """Differences of `params` to the plan's. `external` says whether `params` has the script's own,
    too."""
    planned = {
        name: param
        for name, param in structure.params.items()
        if external or param.residency != "external"
    }
    differences = _one_sided("parameters", params, planned)
    changed = [
        f"{name} ({stored.dtype}{list(stored.shape)} in the plan, "
        f"{params[name][1]}{list(params[name][0])} in the model)"
        for name, stored in sorted(planned.items())
        if name in params and (stored.shape, stored.dtype) != params[name]
    ]
    if changed:
        differences.append(f"parameters differ: {listed(changed)}")
    return differences


def _one_sided(what: str, in_model: Iterable[str], in_plan: Iterable[str]) -> list[str]:
    model, plan = set(in_model), set(in_plan)
    sides = ("model", sorted(model - plan)), ("plan", sorted(plan - model))
    return [f"only the {side} has the {what} {listed(names)}" for side, names in sides if names]


def _input_differences(structure: Structure, graph: Graph) -> list[str]:
    inputs = describe_inputs(graph)
    if inputs == structure.inputs:
        return []
    planned, given = (listed(each) or "none" for each in (structure.inputs, inputs))
    return [f"the plan is for inputs {planned}, the call has {given}"]


def _refuse(structure: Structure, differences: Iterable[str]) -> None:
    text = "; ".join(differences)
    if text:
        raise PlanMismatchError(
            f"the plan, made for {structure.model}, does not fit this model and its inputs: "
            f"{text}. Plan again for what you run"
        )
