"""The least memory that any plan holds, known from the step alone: without prices or choices."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from autopar.cost_model.event_prices import is_open
from autopar.cost_model.lives import lives, results_in_order
from autopar.cost_model.optimizer import ParamMemory
from autopar.cost_model.saved import Rounding
from autopar.ir.graph import Graph, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import is_optional
from autopar.ir.peak_candidates import is_peak_candidate
from autopar.ir.sharding import Sharding
from autopar.ir.uses import groups, is_saved, root_of
from autopar.plans.requests.request import PlanRequest


def least_at_ops(request: PlanRequest) -> list[tuple[int, int]]:
    """(bytes, index of an op) that a device holds at least while it computes that op, whatever is
    decided. Nothing is cut finer than over all devices. Counted are what the op reads and makes,
    parameters with gradients and optimizer states unless some may be on the host, and outputs that
    are ready."""
    devices, at_rest = request.mesh.num_devices, least_at_rest(request)
    results = [(last, num_bytes // devices) for _, last, num_bytes in _results(request.step)]

    def held(index: int, sizes: Sequence[int]) -> int:
        ready = sum(num_bytes for last, num_bytes in results if last < index)
        return at_rest + ready + sum(size // devices for size in sizes)

    return [(held(*each), each[0]) for each in _sizes_at_ops(request.step)]


def least_after_forward(request: PlanRequest) -> int:
    """Bytes that a device holds at least when forward ends, whatever is recomputed: parameters with
    gradients and optimizer states, outputs, and the least that backward can start from. What may be
    on the host is there as far as its memory goes.

    That least is a minimum cut, by maximum flow, between tensors that cannot be recomputed and what
    backward reads.
    """
    graph, devices, rounding = request.step, request.mesh.num_devices, Rounding(request)
    results = sum(num_bytes // devices for _, _, num_bytes in _results(graph))
    held = least_at_rest(request) + results
    saved = {each.root for each in groups(graph) if is_saved(graph, each)}
    everything = sum(rounding.saved_type(root).num_bytes for root in saved)
    if held + everything // devices <= request.memory_limit_bytes:
        return held
    opened = request.opened()
    least = _least_saved(opened) // devices
    return held + max(0, least - opened.host_memory_bytes if is_open(opened) else least)


def _least_saved(request: PlanRequest) -> int:
    """The least bytes, of all devices, of what a step saves whose optional copies are open, beside
    its outputs."""
    graph, rounding = request.step, Rounding(request)
    forward = {n.name: n.index for n in graph.with_role(Role.OP) if n.phase is Phase.FORWARD}
    free = {root for root, _, _ in _results(graph)}
    network: nx.DiGraph[object] = nx.DiGraph()
    for group in groups(graph):
        root, maker = group.root, graph.nodes[group.root.node]
        is_copy = is_optional(maker)
        if not (is_copy or is_saved(graph, group)):
            continue
        tensor = Ref(forward[maker.name], root.output) if is_copy else root
        num_bytes = 0 if tensor in free else rounding.saved_type(root).num_bytes
        network.add_edge((_NEEDED, tensor), tensor, capacity=num_bytes)
        if not is_copy:
            network.add_edge(_SOURCE, (_NEEDED, tensor))
        for use in group.uses:
            user = graph.nodes[use.node]
            if not is_optional(user):
                network.add_edge(tensor, _SINK)
                continue
            for output in range(len(user.outputs)):
                network.add_edge(tensor, (_NEEDED, Ref(forward[user.name], output)))
    if _SOURCE not in network or _SINK not in network:
        return 0
    flow = nx.maximum_flow_value(network, _SOURCE, _SINK)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return int(flow)  # pyright: ignore[reportUnknownArgumentType]


_SOURCE, _SINK, _NEEDED = "not recomputed", "read in backward", "needed"
"""Nodes of the network that `_least_saved` cuts: an edge from a tensor that is needed to that
tensor. Edges without capacity cannot be cut."""


def _results(graph: Graph) -> list[tuple[Ref, int, int]]:
    """(root, index of the last op that reads it, bytes) of each output that forward has ready."""
    return [
        (root_of(graph, output.inputs[0])[0], last, graph.type_of(output.inputs[0]).num_bytes)
        for output, last in results_in_order(graph)
    ]


def least_at_rest(request: PlanRequest) -> int:
    """The least bytes on a device of parameters with gradients and optimizer states."""
    memory, whole = ParamMemory(request), Sharding.replicated(len(request.mesh.axes))
    are_here = request.opened().params_on_host == frozenset()
    params = request.step.with_role(Role.PARAM) if are_here else ()
    return sum(memory.at_rest(param, whole) // request.mesh.num_devices for param in params)


@per_graph
def _sizes_at_ops(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(index, bytes of each tensor that the op reads or makes) of ops that are computed whatever is
    decided. Inputs of the step and parameters are left out."""
    read = grouped(
        (place, life.group.root)
        for life in lives(graph)
        if graph.nodes[life.group.root.node].role is Role.OP
        for place in life.uses
    )
    return tuple(
        (
            node.index,
            (
                *(output.num_bytes for output in node.outputs),
                *(graph.type_of(ref).num_bytes for ref in dict.fromkeys(read.get(node.index, ()))),
            ),
        )
        for node in graph.with_role(Role.OP)
        if is_peak_candidate(graph, node.index) and not (node.view or is_optional(node))
    )
