"""One step under a plan's decisions, priced and simulated event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_model.event_prices import EventPrices, PricedStep, copies, host_contention
from autopar.cost_model.kernel_cost import op_ns, traffic
from autopar.cost_model.moves import move_ns, to_ns
from autopar.cost_model.optimizer import update_s
from autopar.cost_model.optimizer_kinds import Optimizer, find_optimizers
from autopar.cost_model.windows import Hiding
from autopar.errors import PlanMismatchError
from autopar.ir.buckets import is_bucketed, sharing
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import Role, TensorType
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.redistribute import buffer_bytes, step
from autopar.ir.schedule import Schedule
from autopar.ir.timeline import Timeline, simulate_events
from autopar.ir.uses import Group, groups
from autopar.plans.layout import Layout, parse_layout
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest
from autopar.plans.scheduling.events import schedule
from autopar.plans.structure import Stage


@dataclass(frozen=True, slots=True)
class StepSimulation:
    """The schedule of a step, its simulated timeline, the prices of its events, and what windows
    hide."""

    scheduled: Schedule
    timeline: Timeline
    prices: EventPrices
    hiding: Hiding


def simulate_step(request: PlanRequest, structure: Stage) -> StepSimulation:
    """One step on each device under `structure`. PlanMismatchError if the decisions do not fit the
    graph, or a tensor never reaches the sharding that a use needs."""
    cluster, mesh, options = request.cluster, request.mesh, request.options
    layout = parse_layout(request.step, structure)
    alike = {group.key: group for group in groups(layout.graph)}
    steps = {key: tuple(_steps(layout, cluster, mesh, group)) for key, group in alike.items()}
    copied = copies(layout, cluster)
    scheduled = schedule(layout)
    hiding = Hiding.of(mesh, cluster.device, host_contention(cluster) if copied else ())
    prices = EventPrices(
        layout,
        scheduled,
        *_ops_ns(layout, cluster, mesh, fused=options.fuses(cluster.device)),
        {**steps, **copied},
        _updates(layout, cluster, mesh, options),
        hiding.contention,
        cluster.device.granule_bytes,
    )
    before = len(scheduled.microbatch_before), scheduled.microbatches - 1
    timeline = simulate_events(scheduled.events, prices.given(), prices, *before)
    return StepSimulation(scheduled, timeline, prices, hiding)


def _ops_ns(
    layout: Layout, cluster: Cluster, mesh: Mesh, *, fused: bool
) -> tuple[dict[int, int], dict[int, int], dict[int, Sequence[PricedStep]]]:
    """Per op its nanoseconds on the device, those in which the host launches it, and the exchanges
    it sends while it runs."""
    graph, work = layout.graph, traffic(layout.graph, fused=fused)
    kinds = {index: (graph.nodes[index].key, done) for index, done in work.items()}
    nodes = {kind: graph.nodes[index] for index, kind in kinds.items()}
    where = mesh, cluster.device
    priced = {
        (key, done): op_ns(graph, node, done, layout.choice(node), layout.pair(node), *where)
        for (key, done), node in nodes.items()
    }
    sends = {
        kind: [PricedStep(each.kind, each.axis, each.in_bytes, ns, 0) for each, ns in exchanges]
        for kind, (_, exchanges, _) in priced.items()
    }
    return (
        {index: priced[kind][0] for index, kind in kinds.items()},
        {index: priced[kind][2] for index, kind in kinds.items()},
        {index: sends[kind] for index, kind in kinds.items() if sends[kind]},
    )


def _updates(layout: Layout, cluster: Cluster, mesh: Mesh, options: Options) -> dict[int, int]:
    """The optimizer's nanoseconds for each parameter that has a gradient, by its node."""
    graph, optimizers = layout.graph, find_optimizers(options.given.optimizer)
    trained = {node.target for node in graph.with_role(Role.GRAD)}
    kinds = {
        node.index: (node.outputs[0], layout.params[node.target], optimizers.of(node))
        for node in graph.with_role(Role.PARAM)
        if node.target in trained
    }
    known: dict[tuple[TensorType, ParamChoice, Optimizer], int] = {}
    for tensor, choice, optimizer in dict.fromkeys(kinds.values()):
        where = tensor, graph.atoms, choice.storage, mesh, cluster.device
        host = cluster.host if choice.num_on_host else None
        known[tensor, choice, optimizer] = to_ns(update_s(optimizer, *where, host))
    return {index: known[kind] for index, kind in kinds.items()}


def _steps(layout: Layout, cluster: Cluster, mesh: Mesh, group: Group) -> Iterator[PricedStep]:
    """The priced steps of the route of a group, and of all groups of its key."""
    graph = layout.graph
    tensor, atoms = graph.type_of(group.root), graph.atoms
    shared = sharing(graph) if is_bucketed(graph, group) else None
    for source, target in layout.routes.get(group.key, ()):
        move = step(tensor, atoms, source, target)
        if move is None:
            raise PlanMismatchError(f"{group.key}: {source} -> {target} is not a single step")
        where = tensor, atoms, source, target, move
        ns, host_ns = move_ns(*where, mesh, cluster.device, sharing=shared)
        num_bytes, _ = buffer_bytes(*where, mesh.sizes)
        yield PricedStep(move.kind, move.axis, num_bytes, ns, host_ns)
