"""From the solution of a problem to the decisions of a plan, under canonical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import SolverError
from autopar.ir.choices import Choice, ParamChoice, Saved, shardings
from autopar.ir.graph import Graph, Node, Role
from autopar.ir.offloading import Hosting, can_be_on_host, offloadable
from autopar.ir.own_ops import original_key
from autopar.ir.passes.rounding import rounded_key
from autopar.ir.problem import Conflict, Label, Problem, Solution
from autopar.ir.sharding import Sharding
from autopar.ir.units import format_bytes
from autopar.ir.uses import SAVED
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.host_copies import pace
from autopar.plans.structure import MeshAxis, Param, Stage


def make_stage(request: PlanRequest, problem: Problem, solution: Solution) -> Stage:
    """The decisions of `solution`, which must have a choice for every node of `problem`."""
    graph, mesh = request.graph, request.mesh
    chosen = _chosen(problem, solution)
    roles = {node.key: node.role for node in request.step.nodes}
    params: dict[str, Param] = {}
    for node in graph.with_role(Role.PARAM):
        choice, tensor = chosen[node.key], node.outputs[0]
        assert isinstance(choice, ParamChoice)
        states = str(choice.storage), str(choice.for_backward)
        residency = "cpu" if node.target in (request.params_on_host or ()) else "cuda"
        residency = "external" if node.external else residency
        params[node.target] = Param(tensor.shape, tensor.dtype, *states, residency)
    texts = {key: str(choice) for key, choice in chosen.items()}
    return Stage(
        axes=tuple(MeshAxis(axis.name, axis.size, axis.bucket_bytes) for axis in mesh),
        params=params,
        ops={key: text for key, text in texts.items() if roles.get(key) is Role.OP},
        outputs={key: text for key, text in texts.items() if roles.get(key) is Role.DETACHED},
        routes=_routes(problem, solution),
        recompute=request.recompute or (),
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
    return {
        flow.key: tuple(
            f"{flow.states[flow.tails[a]]} -> {flow.states[flow.heads[a]]}" for a in used
        )
        for flow, used in zip(problem.flows, solution.arcs, strict=True)
        if used
    }


def describe_conflict(conflict: Conflict, *, on_host: bool = False) -> str:
    """How much memory is missing, and what holds most; of the host's memory if it is `on_host`."""
    missing = format_bytes(conflict.needed - conflict.limit)
    holders = ", ".join(f"{key} {format_bytes(size)}" for key, size in conflict.largest[:5])
    where, limit, option = "per device", "the memory limit", "--memory-limit"
    if on_host:
        where, limit = "per device in its host's memory", "its share"
        option = "--memory-host"
    return (
        f"the smallest-memory plan needs {format_bytes(conflict.needed)} {where} where {limit} "
        f"is {format_bytes(conflict.limit)}: {missing} is missing. Most is held by {holders}. "
        f"Raise {option}, use more devices, or lower the batch"
    )


# A first problem has optional copies: it leaves open what backward recomputes and offloads. Its
# solution is resolved to a plan of the step with just the copies that it uses.


def resolved_request(request: PlanRequest, problem: Problem, solution: Solution) -> PlanRequest:
    """The request with all that `solution` decides: what backward recomputes, what is offloaded,
    and which parameters live on the host. `solution` has a choice for every node of `problem`."""
    chosen = _chosen(problem, solution)
    recompute = request.recompute
    if recompute is None:
        copied = (k for k, label in chosen.items() if isinstance(label, Choice))
        recompute = tuple(sorted(k.removeprefix(SAVED) for k in copied if k.startswith(SAVED)))
    resolved = replace(request, recompute=recompute, params_on_host=_on_host(request, chosen))
    candidates = offloadable(resolved.step, request.mesh)
    maker_of = {
        key: resolved.step.nodes[tensors[0].root.node].key for key, tensors in candidates.items()
    }
    offloaded = (
        key
        for key, maker in maker_of.items()
        for label in [chosen.get(SAVED + key) or _saved(maker, chosen)]
        if isinstance(label, Saved) and label.offloaded
    )
    return replace(resolved, offloaded=tuple(sorted(offloaded)))


def _on_host(request: PlanRequest, chosen: Mapping[str, Label]) -> frozenset[str]:
    """The parameters that live on the host."""
    if request.params_on_host is not None:
        return request.params_on_host
    names, known = set[str](), dict(request.known_on_host)
    for key, members in can_be_on_host(request.graph).items():
        label = chosen[key]
        assert isinstance(label, ParamChoice)
        names.update(Hosting.of(members, known).names(label.num_on_host))
    return frozenset(names)


def same_choice(
    problem: Problem, solution: Solution, stated: Problem, step: Graph
) -> tuple[int, ...]:
    """The choice in the problem `stated` that equals `solution`.

    `solution` is one of `problem`, which has optional copies; `stated` is the problem of the
    resolved `step`. A tensor that was saved in a sharding that only copies need is saved as its op
    leaves it. SolverError, naming the decision, if there is no such choice.
    """
    chosen = _chosen(problem, solution)
    ops = {node.key: node for node in step.with_role(Role.OP)}
    choice: list[int] = []
    for key, labels in zip(stated.keys, stated.labels, strict=True):
        target = _target_label(key, chosen)
        if isinstance(target, Sharding) and rounded_key(key) and target not in labels:
            target = _leaving_in(target, ops[key], labels)
        if target not in labels and key.startswith(SAVED):
            target = _output_label(key.removeprefix(SAVED), ops, chosen)
        if target not in labels:
            raise SolverError(
                f"{key} cannot be {target} once it is known what is recomputed; this is a defect "
                "of autopar"
            )
        choice.append(labels.index(target))
    return tuple(choice)


def _chosen(problem: Problem, solution: Solution) -> dict[str, Label]:
    triples = zip(problem.keys, problem.labels, solution.choice, strict=True)
    return {key: labels[c] for key, labels, c in triples}


def _output_label(key: str, ops: Mapping[str, Node], chosen: Mapping[str, Label]) -> Label:
    """The sharding in which an op leaves the output whose `uses.root_key` is `key`."""
    maker, output = (
        (key, 0) if key in ops else (key.rpartition(".")[0], int(key.rpartition(".")[2]))
    )
    choice = chosen[maker]
    assert isinstance(choice, Choice)
    return shardings(ops[maker], choice)[1][output]


def _leaving_in(state: Sharding, node: Node, labels: Sequence[Label]) -> Label:
    """The choice of an op that rounds a tensor, or restores it, with which the output is in
    `state`."""
    return next(
        label
        for label in labels
        if isinstance(label, Choice) and shardings(node, label)[1][0] == state
    )


def _saved(key: str, chosen: Mapping[str, Label]) -> Label | None:
    """The decision on how outputs of the ops `key` are saved; of a rounded output, that of the
    original."""
    original = rounded_key(key) or key
    return chosen.get(SAVED + original) or chosen.get(f"{SAVED}{original}.0")


def _target_label(key: str, chosen: Mapping[str, Label]) -> Label:
    """The decision on a class of the resolved step. That on a copy, or on one saved output of an
    op, is part of the decision on optional copies. For an op that rounds a tensor, or restores it,
    only the sharding is decided."""
    if key in chosen and not isinstance(chosen[key], Saved):
        return chosen[key]
    if key not in chosen and rounded_key(key.removeprefix(SAVED)):
        label = _saved(key.removeprefix(SAVED), chosen)
        assert label is not None
        return label.states[0] if isinstance(label, Saved) else label
    original = original_key(key)
    if original != key:
        return chosen[SAVED + original]
    whole, _, output = key.rpartition(".")
    label = chosen.get(key) or chosen[whole]
    assert isinstance(label, Saved)
    return label.states[0 if key in chosen else int(output)] if label.states else label
