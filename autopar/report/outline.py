"""A plan in plain text, for review and for golden tests: parameters, activations, collectives.

Equal blocks are one line each. An activation is listed where it leaves a module: its sharding as
computed, and behind an arrow those in which it is used. Dims are those of the tensor as its op
makes it, axes in the order of `placed.on_axes`. `S(0.1)` is the second part of dim 0: the sequence,
where batch and sequence are one dim.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.sharding import Sharding
from autopar.ir.units import format_bytes, format_seconds
from autopar.ir.uses import Group, groups, root_key
from autopar.plans.layout import layouts
from autopar.plans.plan import Plan
from autopar.plans.requests.matching import general
from autopar.report.names import WHOLE_MODEL, short_op
from autopar.report.placed import on_axes, param_groups
from autopar.report.printed import Row, columns


def outline(graph: Graph, plan: Plan) -> str:
    """The text of `plan`, which is for `graph`; it ends in a newline."""
    estimates, waits_ns = plan.estimates, plan.estimates.exposed_host_ns
    step = ", ".join(
        f"{name} {format_seconds(ns / 1e9)}"
        for name, ns in (
            ("compute", estimates.compute_ns),
            ("exposed communication", estimates.exposed_communication_ns),
            ("optimizer", estimates.optimizer_ns),
            *([("waiting for the host", waits_ns)] if waits_ns else []),
        )
    )
    lines = [
        f"{plan.structure.model} on {plan.structure.cluster}: {plan.structure.mesh_text}",
        *plan.structure.inputs,
        f"step {format_seconds(estimates.step_ns / 1e9)}: {step}",
        f"hidden communication {format_seconds(estimates.hidden_communication_ns / 1e9)}",
        f"{format_seconds(plan.provenance.objective_ns / 1e9)} as modelled, "
        f"{plan.provenance.status}",
        f"memory {format_bytes(estimates.memory.total)}",
    ]
    for title, rows in (
        ("parameters, as stored", _params(plan)),
        ("activations, as computed -> as used", _activations(graph, plan)),
        ("collectives, with local bytes", _collectives(plan)),
    ):
        lines += ["", title, *columns(rows)]
    return "\n".join(lines) + "\n"


def _params(plan: Plan) -> list[Row]:
    structure = plan.structure.only
    params = sorted(param_groups(structure.params, structure.mesh), key=lambda group: group.name)
    return [
        (p.name, p.stored + f", for backward {p.for_backward}" * (p.for_backward != p.storage))
        for p in params
    ]


def _activations(graph: Graph, plan: Plan) -> list[Row]:
    stage = plan.structure.only
    (layout,) = layouts(graph, plan.structure)
    graph = layout.graph
    fed = _fed(graph)
    states: dict[str, tuple[str, str, list[Sharding]]] = {}
    for group in groups(graph):
        root = graph.nodes[group.root.node]
        if root.index in fed and group.phase is Phase.FORWARD and _leaves(graph, group):
            source = layout.source(group)
            name = f"{general(root.module) or WHOLE_MODEL}: {short_op(root.op)}"
            row = name, on_axes(source, stage.mesh), list[Sharding]()
            reached = states.setdefault(root_key(graph, group.root), row)[2]
            reached.extend(s for s in layout.use_states(group) if s not in (source, *reached))
    return [
        (name, " -> ".join((computed, *(on_axes(s, stage.mesh) for s in reached))))
        for name, computed, reached in states.values()
    ]


def _fed(graph: Graph) -> frozenset[int]:
    """Forward ops that depend on an input or a parameter: no tables of positions, no masks."""
    fed = {node.index for node in graph.with_role(Role.INPUT, Role.PARAM)}
    for node in graph.with_role(Role.OP):
        if any(ref.node in fed for ref in node.inputs):
            fed.add(node.index)
    ops = (node for node in graph.with_role(Role.OP) if node.phase is Phase.FORWARD)
    return frozenset(node.index for node in ops if node.index in fed)


def _leaves(graph: Graph, group: Group) -> bool:
    """Whether another module than the one that makes the group's tensor uses it."""
    module = graph.nodes[group.root.node].module
    return any(graph.nodes[use.node].module != module for use in group.uses)


def _collectives(plan: Plan) -> list[Row]:
    order = {phase.value: k for k, phase in enumerate(Phase)}
    totals = sorted(
        plan.stages[0].estimates.collectives, key=lambda c: (order[c.phase], c.axis, c.kind)
    )
    return [(c.phase, c.kind, c.axis, str(c.count), format_bytes(c.num_bytes)) for c in totals]
