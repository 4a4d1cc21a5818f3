"""The cost breakdown of a plan, added up from the plan itself.

`price` states a problem over classes of nodes; this walks every node of the graph under the plan's
decisions. As modelled, the two must agree to the nanosecond, or one of them is wrong: `compile`
checks that. The step and its memory are those of the simulated schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model.event_prices import EventPrices, PricedStep
from autopar.cost_model.host_memory import host_memory
from autopar.cost_model.memory import (
    arrivals,
    fullest_points,
    memory_curve,
    microbatch_memory,
    microbatch_times,
    peak_memory,
    waiting_bytes,
)
from autopar.cost_model.rates import (
    cluster_rates,
    inputs,
    outputs,
    rate_unit,
    reads,
    utilisation_ppm,
)
from autopar.cost_model.step_simulation import simulate_step
from autopar.cost_model.windows import NO_AXIS, Hidden, Hiding
from autopar.ir.blocks import blocks_of, hides_in, launched_in, waits_in
from autopar.ir.buckets import is_bucketed
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.offloading import copied_in
from autopar.ir.passes.microbatches import times
from autopar.ir.uses import Group, groups, is_saved
from autopar.plans.estimates import CollectiveTotal, OpTotal, StageEstimates
from autopar.plans.layout import Layout
from autopar.plans.memory_refinement import CostBreakdown
from autopar.plans.order import order
from autopar.plans.requests.matching import general
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.host_copies import COPIES, copies_of, copy_key
from autopar.plans.structure import Stage
from autopar.rules.work import flops


@collection_paused()
def cost_breakdown(request: PlanRequest, structure: Stage) -> CostBreakdown:
    """Time and memory of one step on each device under `structure`, node by node.

    PlanMismatchError if the decisions do not fit the graph, or a tensor never reaches the sharding
    that a use needs.
    """
    step = simulate_step(request, structure)
    scheduled, prices, timeline = step.scheduled, step.prices, step.timeline
    layout, graph, mesh = prices.layout, prices.graph, request.mesh
    compute, launched, updates = prices.compute, prices.launched, prices.updates
    all_groups = groups(graph)
    waiting = waiting_bytes(scheduled, prices, request.waiting)
    memory, holders = peak_memory(timeline, prices, layout, request, waiting)
    sends = (*_sends(prices, all_groups), *_copies(prices))
    communication_ns = sum(each.times * move.ns for each in sends for move in each.steps)
    launched_ns = sum(each.times * move.host_ns for each in sends for move in each.steps)
    (tokens, samples), microbatches = rate_unit(graph), graph.microbatches
    arrived_ns = arrivals(timeline)
    on_host = host_memory(layout, request, (scheduled.before or scheduled).carried)
    estimates = StageEstimates(
        step_ns=timeline.end_ns,
        compute_ns=microbatches * sum(compute.values()),
        communication_ns=communication_ns,
        optimizer_ns=sum(updates.values()),
        flops=round(microbatches * sum(flops(graph.nodes[index], graph) for index in compute)),
        memory=memory,
        memory_limit=request.memory_limit_bytes,
        collectives=_collectives(mesh, sends),
        ops=_op_totals(layout, all_groups, compute, launched, sends, updates),
        exposed_communication_ns=timeline.exposed_ns,
        hidden_communication_ns=communication_ns - timeline.exposed_ns,
        host_ns=microbatches * sum(launched.values()) + launched_ns,
        exposed_host_ns=timeline.exposed_host_ns,
        hidden=_hidden(prices, step.hiding, all_groups),
        contention=dict(zip(mesh.link_names, step.hiding.contention, strict=False)),
        bubble_ns=0,
        tokens=tokens,
        tokens_per_s=tokens * 10**9 // timeline.end_ns if timeline.end_ns else 0,
        samples=samples,
        mfu_ppm=utilisation_ppm(graph, request.cluster, compute, timeline.end_ns),
        cluster=cluster_rates(request.cluster),
        sends=_by_key(mesh, sends),
        order=order(graph, scheduled.last_microbatch),
        memory_curve=memory_curve(timeline, arrived_ns, waiting),
        peak_holders=holders,
        order_before=order(graph, scheduled.microbatch_before),
        microbatches_before=microbatches - 1,
        host_bytes=on_host.total,
        host_memory=on_host,
        microbatch=microbatch_times(scheduled, arrived_ns, request.cluster.device),
    )
    static = memory.params + memory.gradients + memory.optimizer + memory.accumulated
    static += sum(waiting)
    held = microbatch_memory(scheduled, timeline, prices)
    return CostBreakdown(estimates, held, fullest_points(timeline, graph, mesh, static))


@dataclass(frozen=True, slots=True)
class Sends:
    """The collectives charged to `node` in one phase, each of which happens `times` times per step.
    `key` is that of a group, of an op that sends while it runs, or of a copy to or from the host
    (`host_copies.copy_key`)."""

    key: str
    node: int
    phase: str
    times: int
    steps: Sequence[PricedStep]


def _sends(prices: EventPrices, all_groups: Sequence[Group]) -> Iterator[Sends]:
    graph = prices.graph
    for group in all_groups:
        steps = prices.steps[group.key]
        if steps:
            count = times(graph, group)
            yield Sends(group.key, group.root.node, group.phase.value, count, steps)
    for index, steps in prices.sends.items():
        node = graph.nodes[index]
        yield Sends(node.key, index, node.phase.value, graph.microbatches, steps)


def _copies(prices: EventPrices) -> Iterator[Sends]:
    """Offloads and reloads of activations, and copies of parameters on the host."""
    layout, steps, microbatches = prices.layout, prices.steps, prices.graph.microbatches
    for tensor in layout.offloaded_tensors:
        for kind, phase in zip(COPIES, Phase, strict=True):
            key = copy_key(tensor, layout, kind)
            yield Sends(key, tensor.root.node, phase.value, microbatches, steps[key])
    for each in layout.streamed_params:
        for copy in copies_of(each, layout):
            count = 1 if copy.once else microbatches
            yield Sends(copy.key, each.param.node, copy.phase.value, count, steps[copy.key])


def _hidden(prices: EventPrices, hiding: Hiding, all_groups: Sequence[Group]) -> dict[str, int]:
    """Nanoseconds hidden in each window, added up op by op and step by step."""
    layout, graph, mesh, steps = prices.layout, prices.graph, prices.layout.mesh, prices.steps
    hidden, known = Hidden(hiding, graph.microbatches), blocks_of(graph, mesh)
    for index, ns in prices.compute.items():
        place = known.window_of(graph.nodes[index])
        hidden.add(place, hiding.computed(ns))
        hidden.add(place, hiding.launched(prices.launched[index]))
        for each in prices.sends.get(index, ()):
            hidden.add(place, hiding.waited(each.axis, each.ns))
    for group in all_groups:
        is_sent = is_bucketed(graph, group)
        place = hides_in(graph, mesh, group) if is_sent else waits_in(graph, mesh, group)
        once = times(graph, group) < graph.microbatches
        for each in steps[group.key]:
            axis = NO_AXIS if each.kind == "slice" else each.axis
            saved = hiding.sent(axis, each.ns) if is_sent else hiding.waited(axis, each.ns)
            hidden.add(place, saved, once=once)
            launched_ns = hiding.launched(each.host_ns)
            hidden.add(launched_in(graph, mesh, group), launched_ns, once=once)
    for tensor in layout.offloaded_tensors:
        for kind, place in zip(COPIES, copied_in(graph, mesh, tensor), strict=True):
            (each,) = steps[copy_key(tensor, layout, kind)]
            hidden.add(place, hiding.sent(each.axis, each.ns))
            hidden.add(place, hiding.launched(each.host_ns))
    for param in layout.streamed_params:
        for copy in copies_of(param, layout):
            (each,) = steps[copy.key]
            hidden.add(copy.place, hiding.sent(each.axis, each.ns), once=copy.once)
            hidden.add(copy.place, hiding.launched(each.host_ns), once=copy.once)
    return hidden.by_window


def _collectives(mesh: Mesh, sends: Sequence[Sends]) -> tuple[CollectiveTotal, ...]:
    sums: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for each in sends:
        for kind, axis, *figures in each.steps:
            place = each.phase, axis, kind
            more = (each.times * n for n in (1, *figures))
            sums[place] = [a + b for a, b in zip(sums[place], more, strict=True)]
    return tuple(
        CollectiveTotal(kind, mesh.link_names[axis], phase, *figures)
        for (phase, axis, kind), figures in sorted(sums.items())
    )


def _by_key(mesh: Mesh, sends: Sequence[Sends]) -> dict[str, tuple[CollectiveTotal, ...]]:
    """The collectives of each key, in the order in which they are sent."""
    by_key = grouped((each.key, each) for each in sends)
    return {key: tuple(_added_up(mesh, members)) for key, members in sorted(by_key.items())}


def _added_up(mesh: Mesh, sends: Sequence[Sends]) -> Iterator[CollectiveTotal]:
    """Step k of all `sends` together: they take the same steps."""
    for k, (kind, axis, *_) in enumerate(sends[0].steps):
        num_bytes = sum(each.times * each.steps[k].in_bytes for each in sends)
        ns = sum(each.times * each.steps[k].ns for each in sends)
        host = sum(each.times * each.steps[k].host_ns for each in sends)
        name, phase = mesh.link_names[axis], sends[0].phase
        count = sum(each.times for each in sends)
        yield CollectiveTotal(kind, name, phase, count, num_bytes, ns, host)


def _op_totals(
    layout: Layout,
    all_groups: Sequence[Group],
    compute: Mapping[int, int],
    launched: Mapping[int, int],
    sends: Sequence[Sends],
    updates: Mapping[int, int],
) -> dict[str, OpTotal]:
    """Totals per key; a redistribution is charged to the op that makes the tensor."""
    graph = layout.graph
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0, 0])
    charged = (*compute, *(each.node for each in sends), *updates)
    example = {graph.nodes[index].key: graph.nodes[index] for index in reversed(charged)}
    for index, ns in compute.items():
        total = sums[graph.nodes[index].key]
        total[0] += graph.microbatches
        total[1] += graph.microbatches * ns
        total[5] += graph.microbatches * launched[index]
    for each in sends:
        sums[graph.nodes[each.node].key][2] += sum(each.times * step.ns for step in each.steps)
    for index, ns in updates.items():
        sums[graph.nodes[index].key][4] += ns
    for group in all_groups:
        if is_saved(graph, group):
            node = graph.nodes[group.root.node]
            sums[node.key][3] += layout.held_bytes(group.root, layout.for_backward(group.root))
    typical, read = _typical(graph, compute), reads(layout, all_groups)
    gradients = {node.target: node for node in graph.with_role(Role.GRAD)}
    readers = typical | {
        node.key: gradients[node.target]
        for node in example.values()
        if node.role is Role.PARAM and node.target in gradients
    }
    return {
        key: OpTotal(
            module=general(example[key].module),
            op=example[key].op,
            phase=example[key].phase.value,
            count=count,
            compute_ns=compute_ns,
            communication_ns=communication_ns,
            saved_bytes=saved,
            optimizer_ns=optimizer_ns,
            inputs=inputs(layout, readers[key], read) if key in readers else (),
            outputs=outputs(layout, typical.get(key, example[key])),
            host_ns=host,
        )
        for key, (count, compute_ns, communication_ns, saved, optimizer_ns, host) in sums.items()
        if count or communication_ns or optimizer_ns
    }


def _typical(graph: Graph, compute: Mapping[int, int]) -> dict[str, Node]:
    """The middle op of each key, which is in the middle of a stack of blocks too."""
    by_key = grouped((graph.nodes[index].key, index) for index in compute)
    return {key: graph.nodes[indices[len(indices) // 2]] for key, indices in by_key.items()}
