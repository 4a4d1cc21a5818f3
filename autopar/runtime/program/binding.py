"""From a program that is bound to this rank to the step that the compiled module runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import OUTPUT_ROLES, Atom, Graph, Role, TensorType
from autopar.ir.grouping import grouped
from autopar.ir.input_sharding import input_state
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import nesting
from autopar.ir.sharding import Sharding
from autopar.runtime.ops.host_copies import RELOAD, wait_for_loads
from autopar.runtime.process.pre_step_check import PreStepCheck
from autopar.runtime.process.world import Groups, dtensor_placements
from autopar.runtime.program.backend import prepare
from autopar.runtime.program.function import RunnableGraph as LocalGraph
from autopar.runtime.program.function import Step
from autopar.runtime.program.meter import Meter
from autopar.runtime.program.microbatch_run import (
    Graphs,
    MicrobatchedStep,
    MicrobatchNames,
    microbatch_runner,
)
from autopar.runtime.program.program import Program
from autopar.runtime.program.sharded_ops import Place


class Result(NamedTuple):
    """A leaf of the model's output: the program's result `name`, or the constant `value`."""

    name: str | None
    value: Any = None


def runnable(
    program: Program,
    backend: str,
    meter: Meter,
    pre_step_check: PreStepCheck | None,
    where: str = "",
) -> Graphs:
    """The graphs of a bound program, as `backend` runs them; `where` names the part of the model
    that they are. With a `pre_step_check`, an error of a collective says which it was and where the
    other ranks are."""
    modules = program.graphs
    # Forward reloads nothing but parameters that are on the host.
    reads_host = any(node.target is RELOAD for node in program.forward.graph.nodes)

    def make(phase: str, gm: fx.GraphModule) -> LocalGraph:
        graph = prepare(gm, backend)
        if reads_host:
            graph = _waiting(graph, meter.device)
        return (
            graph
            if pre_step_check is None
            else pre_step_check.with_rank_errors(phase + where, gm, graph)
        )

    if backend == "eager":
        meter.count_waits(*modules.values())
    return {at: make(at[1], gm) for at, gm in modules.items()}


def make_step(program: Program, graphs: Graphs, meter: Meter, **shown: Any) -> Step:
    """The step of a bound program, which runs `graphs`; `meter` measures it, and `shown` are
    further arguments of `Step`."""
    if program.microbatches > 1:
        names, device = MicrobatchNames.of(program), meter.device
        microbatches = MicrobatchedStep(names, microbatch_runner(program, graphs, device), device)
        return Step(
            forward=meter.timed("forward", microbatches.forward),
            backward=meter.timed("backward", microbatches.backward),
            inference=meter.timed("forward", microbatches.inference),
            forward_inputs=names.inputs,
            forward_outputs=names.results + microbatches.saved,
            backward_inputs=(*microbatches.saved, *microbatches.tangents),
            backward_outputs=program.backward_outputs,
            **shown,
        )
    backward = graphs.get((True, "backward"))
    return Step(
        forward=meter.timed("forward", graphs[True, "forward"]),
        backward=None if backward is None else meter.timed("backward", backward),
        forward_inputs=program.forward_inputs,
        forward_outputs=program.forward_outputs,
        backward_inputs=program.backward_inputs,
        backward_outputs=program.backward_outputs,
        **shown,
    )


def _waiting(graph: LocalGraph, device: torch.device) -> LocalGraph:
    """`graph`, after which parameters on the host may change: their copies are complete."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        outputs = graph(inputs)
        wait_for_loads(device)
        return outputs

    return run


def sharded_inputs(graph: Graph, mesh: Mesh) -> frozenset[str]:
    """The inputs, by their names in `Program.forward_inputs`, that a program on `mesh` takes as
    local shards."""
    return frozenset(
        f"input:{node.target}"
        for node in graph.with_role(Role.INPUT)
        if not input_state(node, graph.atoms, mesh.sizes).is_replicated
    )


def detached_places(
    graph: Graph, program: Program, groups: Groups | None, *, of_stage: bool = False
) -> dict[str, Place]:
    """The place of each sharded detached output, by its name, of a program or of that `of_stage`;
    none on one device.

    DTensor shards a dim by the axes of its mesh from left to right. Of the two meshes of `groups`,
    the one is used that shards the atoms of the output in that order.
    """
    if groups is None:
        return {}
    places: dict[str, Place] = {}
    for node in graph.with_role(Role.DETACHED):
        if int(node.target) not in program.detached_shardings:
            continue
        sharding = program.detached_shardings[int(node.target)]
        tensor = graph.type_of(node.inputs[0])
        orders = [
            _cut_order(tensor, graph.atoms, sharding, dim) for dim in range(len(tensor.shape))
        ]
        if all(list(order) == sorted(order, reverse=True) for order in orders):
            place = Place(*groups.stored(sharding))
        elif all(list(order) == sorted(order) for order in orders):
            place = Place(groups.others, dtensor_placements(sharding))
        else:
            raise PlanError(f"output {node.target} in {sharding} is no DTensor; plan again")
        places[f"detached:{node.target}"] = (
            place._replace(shape=tensor.shape) if of_stage else place
        )
    return places


def _cut_order(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, dim: int
) -> tuple[int, ...]:
    """The mesh axes that cut a dim, outermost first."""
    return tuple(
        axis
        for part, atom in enumerate(tensor.parts[dim])
        for axis in nesting(atoms[atom], sharding.axes_on((dim, part)))
    )


class RowResult(NamedTuple):
    """A result whose dim `dim` has the rows of the batch, outermost: those of the local input at
    position `source`."""

    dim: int
    source: int


def row_results(graph: Graph) -> dict[str, RowResult]:
    """The results, by name, that have rows of a local input."""
    sources: dict[int, int] = {}
    for node in graph.with_role(Role.INPUT):
        if node.input_sharding and node.outputs[0].parts[0]:
            sources.setdefault(node.outputs[0].parts[0][0], int(node.target))
    by_name: dict[str, RowResult] = {}
    for role in (Role.VALUE, Role.DETACHED):
        for node in graph.with_role(role):
            for dim, parts in enumerate(graph.type_of(node.inputs[0]).parts):
                if parts and parts[0] in sources:
                    by_name[f"{role.value}:{node.target}"] = RowResult(dim, sources[parts[0]])
                    break
    return by_name


def sequence_results(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The results, by name, whose dim 1 is that of inputs, and the positions of those."""
    by_parts = grouped(
        (node.outputs[0].parts[1:2], int(node.target))
        for node in graph.with_role(Role.INPUT)
        if any(node.outputs[0].parts[1:2])
    )
    return {
        f"{role.value}:{node.target}": tuple(by_parts[graph.type_of(node.inputs[0]).parts[1:2]])
        for role in (Role.VALUE, Role.DETACHED)
        for node in graph.with_role(role)
        if graph.type_of(node.inputs[0]).parts[1:2] in by_parts
    }


def results(graph: Graph, leaves: Iterable[tuple[int | None, Any]]) -> tuple[Result, ...]:
    """The leaves of the model's output under the names that the program gives them: each an item of
    what `graph` returns, or a constant."""
    names = [f"{n.role.value}:{n.target}" for n in graph.nodes if n.role in OUTPUT_ROLES]
    return tuple(
        Result(None, value) if item is None else Result(names[item]) for item, value in leaves
    )
