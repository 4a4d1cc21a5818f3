"""From a solution to the decisions of a plan: every label and arc under its canonical name."""

from __future__ import annotations

from autopar.ir.choices import ParamChoice
from autopar.ir.graph import Role
from autopar.ir.problem import Conflict, Problem, Solution
from autopar.ir.units import format_bytes
from autopar.ir.uses import SAVED
from autopar.plans.host_copies import pace
from autopar.plans.request import PlanRequest
from autopar.plans.structure import MeshAxis, Param, Stage


def make_stage(request: PlanRequest, problem: Problem, solution: Solution) -> Stage:
    """The decisions of `solution`, which must have a choice for every node of `problem`."""
    graph, mesh = request.graph, request.mesh
    chosen = {
        key: labels[c]
        for key, labels, c in zip(problem.keys, problem.labels, solution.choice, strict=True)
    }
    roles = {node.key: node.role for node in request.step.nodes}
    params: dict[str, Param] = {}
    for node in graph.with_role(Role.PARAM):
        choice, tensor = chosen[node.key], node.outputs[0]
        assert isinstance(choice, ParamChoice)
        states = str(choice.storage), str(choice.kept)
        residency = "host" if node.target in (request.hosted or ()) else "device"
        residency = "external" if node.external else residency
        params[node.target] = Param(tensor.shape, tensor.dtype, *states, residency)
    texts = {key: str(choice) for key, choice in chosen.items()}
    return Stage(
        axes=tuple(MeshAxis(axis.name, axis.size, axis.bucket_bytes) for axis in mesh),
        params=params,
        ops={key: text for key, text in texts.items() if roles.get(key) is Role.OP},
        outputs={key: text for key, text in texts.items() if roles.get(key) is Role.DETACHED},
        routes=_routes(problem, solution),
        again=request.again or (),
        offloaded=request.offloaded,
        reload_pace=pace(request.cluster) if request.offloaded else 0,
        saved_dtype=request.options.saved_dtype,
        saved={
            key.removeprefix(SAVED): text for key, text in texts.items() if key.startswith(SAVED)
        },
        replicated_unknown_ops=tuple(
            sorted({n.op for n in graph.with_role(Role.OP) if not n.has_rule})
        ),
        microbatches=request.microbatches,
        loss_chunks=request.loss_chunks,
        is_split=request.is_split,
    )


def _routes(problem: Problem, solution: Solution) -> dict[str, tuple[str, ...]]:
    """Per flow that moves anything, its arcs as "[R, P] -> [R, S(0)]"."""
    routes: dict[str, tuple[str, ...]] = {}
    for flow, used in zip(problem.flows, solution.arcs, strict=True):
        if used:
            routes[flow.key] = tuple(
                f"{flow.states[flow.tails[a]]} -> {flow.states[flow.heads[a]]}" for a in used
            )
    return routes


def describe_conflict(conflict: Conflict, *, on_host: bool = False) -> str:
    """What is missing, and what holds it; of the host's memory if it is `on_host`."""
    missing = format_bytes(conflict.needed - conflict.limit)
    holders = ", ".join(f"{key} {format_bytes(size)}" for key, size in conflict.largest[:5])
    where, limit, option = "per device", "the memory limit", "--memory-limit"
    if on_host:
        where, limit = "per device in its host's memory", "its share"
        option = "--memory-host"
    return (
        f"the leanest plan needs {format_bytes(conflict.needed)} {where} where {limit} "
        f"is {format_bytes(conflict.limit)}: {missing} is missing. Most is held by {holders}. "
        f"Raise {option}, use more devices, or lower the batch"
    )
