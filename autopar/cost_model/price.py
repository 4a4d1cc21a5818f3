"""From a graph, a cluster and a mesh to the `Problem` whose solution is the plan.

node costs     compute time of the choice, times the nodes of the class        (`kernel_cost`);
               the time in which the host launches it                          (`kernel_cost`);
               of a parameter's, its share of the optimizer's step             (`optimizer`)
flows          one per class of groups: redistributions of its tensor          (`flows`)
usages         parameters, gradients, optimizer states, unsharded copies      (`optimizer`);
               activations saved for backward, in the sharding that is chosen  (`offloads`)
offloads       copies to and from the host, instead of memory                  (`offloads`);
               of parameters that live there, and their gradients              (`offloads`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost_model.event_prices import host_contention
from autopar.cost_model.flows import Space, stated_flows
from autopar.cost_model.imposed import impose
from autopar.cost_model.kernel_cost import Traffic, op_ns, traffic
from autopar.cost_model.limits import Limits
from autopar.cost_model.lives import InFlight
from autopar.cost_model.moves import to_ns
from autopar.cost_model.offloads import (
    Offloads,
    ParamsOnHost,
    add_param_copies,
    on_host_counts,
    optional_ops,
    state_of,
)
from autopar.cost_model.optimizer import ParamMemory, update_s
from autopar.cost_model.optimizer_kinds import find_optimizers
from autopar.cost_model.saved import (
    Rounding,
    add_saved_traffic,
    decision_key,
    saved_states,
    with_savings,
)
from autopar.cost_model.space import NodeClass, classes
from autopar.cost_model.windows import Windows
from autopar.errors import InfeasibleError
from autopar.ir.blocks import blocks_of
from autopar.ir.choices import Choice, Decision, ParamChoice, Saved
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import Graph, Role
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import is_result
from autopar.ir.problem import IntArray, Problem, Usage
from autopar.ir.redistribute import local_bytes
from autopar.ir.uses import SAVED, Group, groups
from autopar.plans.requests.request import PlanRequest


@collection_paused()
def price(request: PlanRequest) -> Problem:
    """The problem whose solution is the plan. Costs are in nanoseconds per step. Usages are in
    bytes per device, and their sum may not exceed the memory limit. InfeasibleError if an op has
    no choice at all."""
    graph, cluster, mesh = request.step, request.cluster, request.mesh
    all_groups = groups(graph)
    table, limits = limited_classes(request, all_groups)
    owners = {node.target: node.key for node in graph.with_role(Role.PARAM)}
    offloads = Offloads(request)
    open_classes = offloads.open_classes
    table = with_savings(
        graph, mesh, all_groups, table, owners, limits, optional_ops(graph, open_classes)
    )
    states = saved_states(graph, mesh, all_groups, table, owners, limits, open_classes)
    saves = {key: offloads.labels(key, options) for key, options in states.items()}
    keys = (*table, *(SAVED + key for key in saves))
    number = {key: i for i, key in enumerate(keys)}
    in_state = {key: tuple(map(state_of, labels)) for key, labels in saves.items()}
    space = Space(graph, table, in_state, number, limits, owners)
    hosts = ParamsOnHost(request)
    copied = host_contention(cluster) if offloads.tensors or hosts.members else ()
    windows = Windows.of(mesh, cluster.device, copied, graph.microbatches)
    costs = _compute(request, all_groups, table, windows, hosts)
    costs |= {SAVED + key: np.zeros(len(labels), np.int64) for key, labels in saves.items()}
    in_flight = InFlight(request)
    usages = _held(request, table, saves, 1 + in_flight.others.backward, hosts)
    for key, entry in table.items():
        usages[key] += in_flight.recomputed(key, entry.choices)
    for activations in offloads.saved_for_backward(all_groups, table, saves):
        usages[activations.holder] += in_flight.times(activations.holder) * offloads.held(
            activations
        )
        offloads.add_copies(activations, costs, windows, number)
    add_param_copies(request, hosts, table, costs, windows, number)
    return Problem(
        name=f"{graph.name} on {mesh}",
        keys=(
            *(decision_key(entry.node) for entry in table.values()),
            *(SAVED + key for key in saves),
        ),
        labels=(
            *(entry.choices for entry in table.values()),
            *saves.values(),
        ),
        costs=tuple(costs.values()),
        usages=tuple((Usage(0, 1, amounts),) for amounts in usages.values()),
        flows=stated_flows(space, cluster, mesh, all_groups, windows),
        usage_limit=request.memory_limit_bytes,
        windows=windows.stated(),
    )


def limited_classes(
    request: PlanRequest, all_groups: Sequence[Group]
) -> tuple[dict[str, NodeClass], Limits]:
    """The classes with the choices that imposed constraints leave, and the limits on all else.
    InfeasibleError if a class has no choice."""
    graph, mesh = request.step, request.mesh
    limits = impose(graph, mesh, all_groups, request.imposed)
    table = classes(graph, mesh, all_groups, limits, on_host_counts(request))
    for key, labels in request.narrowed:
        if key in table:
            table[key] = table[key].only(labels)
    for entry in table.values():
        if not entry.choices:
            if entry.node.role is Role.PARAM:
                raise InfeasibleError(
                    f"the gradient of {entry.node.target} cannot be brought into the storage that "
                    "is given for it"
                )
            raise InfeasibleError(
                f"{entry.node.op} in {entry.node.module or graph.name} can be computed on no "
                f"sharding of mesh {mesh}"
            )
    return table, limits


def _compute(
    request: PlanRequest,
    all_groups: Sequence[Group],
    table: Mapping[str, NodeClass],
    windows: Windows,
    hosts: ParamsOnHost,
) -> dict[str, IntArray]:
    """Nanoseconds of every choice of every class, summed over its nodes: compute, and what the op
    sends while it runs; for trained parameters, the optimizer's time."""
    graph, cluster, mesh, options = request.step, request.cluster, request.mesh, request.options
    fused, known = options.fuses(cluster.device), blocks_of(graph, mesh)
    work = traffic(graph, fused=fused)
    kinds = Counter(
        (graph.nodes[index].key, done, known.window_of(graph.nodes[index]))
        for index, done in work.items()
    )
    costs = {key: np.zeros(len(entry.choices), np.int64) for key, entry in table.items()}
    number = {key: i for i, key in enumerate(table)}
    done_of: dict[tuple[str, Traffic], tuple[IntArray, IntArray, IntArray]] = {}
    for (key, done, place), count in kinds.items():
        entry = table[key]
        if (key, done) not in done_of:
            done_of[key, done] = _node_ns(graph, cluster.device, mesh, entry, done)
        computed, sent, launched = done_of[key, done]
        costs[key] += graph.microbatches * count * (computed + sent.sum(axis=0) + launched)
        axes = np.flatnonzero(sent.any(axis=1)).tolist()
        waited = (windows.hiding.waited(axis, sent[axis]) for axis in axes)
        hidden = windows.hiding.computed(computed), windows.hiding.launched(launched), *waited
        windows.add_node(place, number[key], *hidden, count=count)
    where = Rounding(request), mesh, cluster.device, all_groups, table
    add_saved_traffic(*where, work, costs, windows, fused=fused)
    trained = {node.target for node in graph.with_role(Role.GRAD)}
    params = graph.with_role(Role.PARAM)
    members = grouped((node.key, node) for node in params if node.target in trained)
    optimizers = find_optimizers(options.given.optimizer)
    for key, params in members.items():
        tensor = table[key].node.outputs[0]
        for c, choice in enumerate(table[key].choices):
            assert isinstance(choice, ParamChoice)
            names_on_host = (
                hosts.on_host(key, choice.num_on_host) if choice.num_on_host else frozenset[str]()
            )
            kinds = Counter((optimizers.of(each), each.target in names_on_host) for each in params)
            for (optimizer, on_host), count in kinds.items():
                where = tensor, graph.atoms, choice.storage, mesh, cluster.device
                host = cluster.host if on_host else None
                costs[key][c] += count * to_ns(update_s(optimizer, *where, host))
    return costs


def _node_ns(
    graph: Graph, device: Device, mesh: Mesh, entry: NodeClass, done: Traffic
) -> tuple[IntArray, IntArray, IntArray]:
    """Three times of one node in nanoseconds: compute per choice; what sends while it runs add, per
    mesh axis and choice; and the host's launches per choice."""
    computed = np.zeros(len(entry.choices), np.int64)
    sent = np.zeros((len(mesh.axes), len(entry.choices)), np.int64)
    launched = np.zeros(len(entry.choices), np.int64)
    for c, choice in enumerate(entry.choices):
        if isinstance(choice, Saved):
            continue
        assert isinstance(choice, Choice), f"{entry.key} is no op"
        pair = (entry.inputs[c], entry.outputs[c])
        computed[c], sends, launched[c] = op_ns(graph, entry.node, done, choice, pair, mesh, device)
        for each, longer in sends:
            sent[each.axis, c] += longer
    return computed, sent, launched


def _held(
    request: PlanRequest,
    table: Mapping[str, NodeClass],
    saves: Mapping[str, Sequence[Decision]],
    in_flight: int,
    hosts: ParamsOnHost,
) -> dict[str, IntArray]:
    """Bytes per device of every choice, summed over the nodes of a class: parameters, gradients and
    optimizer states, and unsharded copies for `in_flight` microbatches. Sums over microbatches
    count beside the gradients that a script may have accumulated."""
    graph, mesh = request.step, request.mesh
    usages = {key: np.zeros(len(entry.choices), np.int64) for key, entry in table.items()}
    usages |= {SAVED + key: np.zeros(len(labels), np.int64) for key, labels in saves.items()}
    at_rest = ParamMemory(request)
    members = grouped((node.key, node) for node in graph.with_role(Role.PARAM))
    for key, entry in table.items():
        if entry.node.role is Role.PARAM:
            tensor = entry.node.outputs[0]
            for c, choice in enumerate(entry.choices):
                assert isinstance(choice, ParamChoice)
                unsharded = (
                    in_flight * local_bytes(tensor, graph.atoms, choice.for_backward, mesh.sizes)
                    if choice.for_backward != choice.storage
                    else 0
                )
                elsewhere = choice.num_on_host if request.cluster.has_host_memory else 0
                names_on_host = hosts.on_host(key, elsewhere) if elsewhere else frozenset[str]()
                here = [node for node in members[key] if node.target not in names_on_host]
                usages[key][c] = len(here) * unsharded
                stepped_alike = grouped((at_rest.optimizer(node), node) for node in here)
                for alike in stepped_alike.values():
                    usages[key][c] += len(alike) * at_rest.at_rest(alike[0], choice.storage)
        if is_result(entry.node):
            for c, (state,) in enumerate(entry.outputs):
                tensor = entry.node.outputs[0]
                usages[key][c] = entry.count * local_bytes(tensor, graph.atoms, state, mesh.sizes)
    return usages
