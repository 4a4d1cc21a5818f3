"""From programs to the step of this rank, on the process groups of its plan."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.codegen import bind
from autopar.compile import Compiled
from autopar.driver.training.stage_binding import make_step_in_stages
from autopar.errors import PlanMismatchError
from autopar.ir.graph import Graph, Role
from autopar.ir.sharding import Sharding
from autopar.plans.structure import Structure
from autopar.runtime.process.stage_groups import StageGroups, make_stage_groups
from autopar.runtime.process.world import (
    Groups,
    ParamPlace,
    World,
    make_groups,
    param_placements,
)
from autopar.runtime.program.binding import detached_places, make_step, runnable
from autopar.runtime.program.function import Step
from autopar.runtime.program.meter import Meter

_NONE: frozenset[str] = frozenset()


def results_of_gradients(graph: Graph) -> Mapping[str, frozenset[str]]:
    """For each parameter whose gradient does not come from all results that have one, the positions
    of the results that it comes from. In eager it has no gradient if a backward goes through none
    of these."""
    tangents = frozenset(node.target for node in graph.with_role(Role.TANGENT))
    if len(tangents) < 2:
        return {}
    reached: list[frozenset[str]] = []
    for node in graph.nodes:
        own = frozenset((node.target,)) if node.role is Role.TANGENT else _NONE
        reached.append(own.union(*(reached[ref.node] for ref in node.inputs)))
    by_param = {node.target: reached[node.index] for node in graph.with_role(Role.GRAD)}
    return {name: results for name, results in by_param.items() if results != tangents}


AllGroups = Groups | StageGroups
"""The groups of a mesh, or of the meshes of a pipeline's stages."""


def make_all_groups(structure: Structure, world: World) -> AllGroups | None:
    """The process groups of a plan; None in a world of one. A collective call."""
    if world.size == 1:
        return None
    if structure.is_pipeline:
        return make_stage_groups(structure.stages, world)
    return make_groups(structure.only.mesh, world)


def stored_places(structure: Structure, groups: AllGroups | None) -> dict[str, ParamPlace]:
    """Where each parameter is stored, by its name; empty in a world of one, where they are
    plain."""
    if groups is None:
        return {}
    if isinstance(groups, StageGroups):
        return {name: groups.place(name) for name in groups.storage}
    return {
        name: groups.stored(param.choice.storage)
        for name, param in structure.params.items()
        if param.residency != "external"
    }


def check_holders(compiled: Compiled, groups: StageGroups) -> None:
    """PlanMismatchError if a stage of a later program reads a parameter that other stages store."""
    pairs = zip(compiled.plan.structure.stages, compiled.layouts, strict=True)
    for stage, layout in pairs:
        for name in _read(layout.graph):
            holders, _ = groups.storage[name]
            if stage.first_rank not in holders:
                raise PlanMismatchError(
                    f"this call of the model reads parameter {name} in the stage that begins with "
                    f"{stage.start or 'the model'!r}, and it is stored on the ranks from "
                    f"{holders[0]} on: cut the model (pipeline.cuts) where all its calls can be "
                    "cut, or compile it with pipeline.stages=1"
                )


def check_stored(held: Mapping[str, Sharding], planned: Mapping[str, Sharding]) -> None:
    """PlanMismatchError if a later program stores a parameter otherwise than it is `held`. Even
    chunks of a dim are shards of it: a program that reads less of the model may not know the parts
    of the dim."""
    for name, sharding in planned.items():
        if param_placements(held.get(name, sharding)) != param_placements(sharding):
            raise PlanMismatchError(
                f"this call of the model is planned with parameter {name} as {sharding}, which "
                f"lies as {held[name]}; this is a defect of autopar"
            )


def _read(graph: Graph) -> list[str]:
    """The parameters of the model that a graph reads."""
    read = {ref.node for node in graph.nodes for ref in node.inputs}
    params = (node for node in graph.with_role(Role.PARAM) if not node.external)
    return [node.target for node in params if node.index in read]


def bound_step(
    compiled: Compiled, groups: AllGroups | None, world: World, backend: str, meter: Meter
) -> Step:
    """The step of this rank, as `backend` runs it. A collective call."""
    traced = compiled.traced
    cut = frozenset(f"detached:{i}" for i, leaf in enumerate(traced.outputs) if leaf.is_cut)
    shown = {"cut": cut, "reach": results_of_gradients(traced.graph)}
    if compiled.plan.structure.is_pipeline:
        assert groups is None or isinstance(groups, StageGroups)
        return make_step_in_stages(compiled, groups, world, backend, meter, shown)
    assert groups is None or isinstance(groups, Groups)
    mesh = compiled.plan.structure.only.mesh
    names: Mapping[str, str] = {} if groups is None else groups.names
    coordinate = () if groups is None else groups.coordinate
    program = bind(compiled.program, names, mesh, coordinate, world.device)
    graphs = runnable(program, backend, meter, world.pre_step_check)
    places = detached_places(traced.graph, program, groups)
    return make_step(program, graphs, meter, places=places, **shown)
