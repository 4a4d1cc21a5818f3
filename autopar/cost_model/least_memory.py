"""The least memory that any plan holds, known from the step alone: without prices or choices."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model.lives import lives, results_in_order
from autopar.cost_model.optimizer import ParamMemory
from autopar.ir.graph import Graph, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import is_optional
from autopar.ir.peak_candidates import is_peak_candidate
from autopar.ir.sharding import Sharding
from autopar.plans.requests.request import PlanRequest


def least_at_ops(request: PlanRequest) -> list[tuple[int, int]]:
    """(bytes, index of an op) that a device holds at least while it computes that op, whatever is
    decided. Nothing is cut finer than over all devices. Counted are what the op reads and makes,
    parameters with gradients and optimizer states unless some may be on the host, and outputs that
    are ready."""
    graph, devices = request.step, request.mesh.num_devices
    memory, whole = ParamMemory(request), Sharding.replicated(len(request.mesh.axes))
    are_here = request.opened().params_on_host == frozenset()
    params = graph.with_role(Role.PARAM) if are_here else ()
    at_rest = sum(memory.at_rest(param, whole) // devices for param in params)
    results = [
        (last, graph.type_of(output.inputs[0]).num_bytes // devices)
        for output, last in results_in_order(graph)
    ]

    def held(index: int, sizes: Sequence[int]) -> int:
        ready = sum(num_bytes for last, num_bytes in results if last < index)
        return at_rest + ready + sum(size // devices for size in sizes)

    return [(held(*each), each[0]) for each in _sizes_at_ops(graph)]


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
