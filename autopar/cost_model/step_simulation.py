"""One step under a plan's decisions, priced event by event and played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_model.event_prices import EventPrices, PricedStep, copies, host_contention
from autopar.cost_model.kernel_cost import host_ns, node_s, traffic
from autopar.cost_model.moves import move_host_ns, move_ns, sent, to_ns
from autopar.cost_model.optimizer import host_update_s, update_s
from autopar.cost_model.optimizer_kinds import Optimizer, find_optimizers
from autopar.cost_model.windows import Hiding
from autopar.errors import PlanMismatchError
from autopar.ir.buckets import Sharing, is_bucketed, sharing
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import Role
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
    """`compute` has the time of each op on the device, `launched` that in which the host launches
    it, `inside` what it sends while it runs, `updates` the optimizer's time for each parameter;
    `steps` what the route of each group takes, by its key, and `copied` what goes to the host."""

    layout: Layout
    scheduled: Schedule
    timeline: Timeline
    prices: EventPrices
    hiding: Hiding
    compute: Mapping[int, int]
    launched: Mapping[int, int]
    inside: Mapping[int, Sequence[PricedStep]]
    updates: Mapping[int, int]
    steps: Mapping[str, Sequence[PricedStep]]
    copied: Mapping[str, Sequence[PricedStep]]

    @property
    def priced_steps(self) -> Mapping[str, Sequence[PricedStep]]:
        """All that takes links, by key."""
        return {**self.steps, **self.copied}


def simulate_step(request: PlanRequest, structure: Stage) -> StepSimulation:
    """One step on each device under `structure`. PlanMismatchError if the decisions do not fit the
    graph or a tensor never reaches the state a use asks for."""
    cluster, mesh, options = request.cluster, request.mesh, request.options
    layout = parse_layout(request.step, structure)
    graph = layout.graph
    all_groups = groups(graph)
    compute, launched = _ops_ns(layout, cluster, mesh, fused=options.fuses(cluster.device))
    inside = _inside(layout, mesh, compute)
    shares = sharing(graph)
    alike = {group.key: group for group in all_groups}
    where = layout, cluster, mesh
    steps = {key: tuple(_steps(*where, group, shares)) for key, group in alike.items()}
    copied = copies(layout, cluster)
    updates = _updates(layout, cluster, mesh, options)
    scheduled = schedule(layout)
    hiding = Hiding.of(mesh, cluster.device, host_contention(cluster) if copied else ())
    ways = {**steps, **copied}
    contention, granule = hiding.contention, cluster.device.granule_bytes
    prices = EventPrices(
        layout, scheduled, compute, launched, inside, ways, updates, contention, granule
    )
    before = len(scheduled.microbatch_before), scheduled.microbatches - 1
    played = simulate_events(scheduled.events, prices.given(), prices, *before)
    return StepSimulation(
        layout, scheduled, played, prices, hiding,
        compute, launched, inside, updates, steps, copied,
    )  # fmt: skip


def _inside(
    layout: Layout, mesh: Mesh, compute: Mapping[int, int]
) -> dict[int, Sequence[PricedStep]]:
    """What ops send while they run."""
    known: dict[tuple[str, int], Sequence[PricedStep]] = {}
    found: dict[int, Sequence[PricedStep]] = {}
    for index, compute_ns in compute.items():
        node = layout.graph.nodes[index]
        kind = node.key, compute_ns
        if kind not in known:
            ways = sent(layout.graph, node, layout.choice(node), mesh, compute_ns)
            known[kind] = [
                PricedStep(each.kind, each.axis, each.in_bytes, ns, 0) for each, ns in ways
            ]
        if known[kind]:
            found[index] = known[kind]
    return found


def _ops_ns(
    layout: Layout, cluster: Cluster, mesh: Mesh, *, fused: bool
) -> tuple[dict[int, int], dict[int, int]]:
    """Per op its time on the device, and that in which the host launches it."""
    graph, device = layout.graph, cluster.device
    compute, launched = dict[int, int](), dict[int, int]()
    cached: dict[object, tuple[int, int]] = {}
    for index, done in traffic(graph, fused=fused).items():
        node = graph.nodes[index]
        kind = (node.key, done)
        if kind not in cached:
            pair = layout.pair(node)
            choice = layout.choice(node)
            ns = to_ns(node_s(graph, node, done, choice, pair, mesh.sizes, device))
            num_sent = len(sent(graph, node, choice, mesh, ns))
            launch_ns = host_ns(graph, node, done, choice, mesh.sizes, device, num_sent)
            cached[kind] = ns, launch_ns
        compute[index], launched[index] = cached[kind]
    return compute, launched


def _updates(layout: Layout, cluster: Cluster, mesh: Mesh, options: Options) -> dict[int, int]:
    """The optimizer's nanoseconds for each parameter that has a gradient, by its node."""
    graph, optimizers = layout.graph, find_optimizers(options.given.optimizer)
    trained = {node.target for node in graph.with_role(Role.GRAD)}
    found: dict[int, int] = {}
    known: dict[tuple[str, ParamChoice, Optimizer], int] = {}
    for node in graph.with_role(Role.PARAM):
        if node.target in trained:
            choice, tensor = layout.params[node.target], node.outputs[0]
            optimizer = optimizers.of(node)
            kind = node.key, choice, optimizer
            if kind not in known:
                where = optimizer, tensor, graph.atoms, choice.storage, mesh
                seconds = (
                    host_update_s(*where, cluster.host)
                    if choice.num_on_host
                    else update_s(*where, cluster.device)
                )
                known[kind] = to_ns(seconds)
            found[node.index] = known[kind]
    return found


def _steps(
    layout: Layout, cluster: Cluster, mesh: Mesh, group: Group, shares: Sharing
) -> Iterator[PricedStep]:
    """Every step of the route of a group and its like."""
    tensor = layout.graph.type_of(group.root)
    atoms = layout.graph.atoms
    route = layout.routes.get(group.key, ())
    shared = shares if is_bucketed(layout.graph, group) else None
    for source, target in route:
        move = step(tensor, atoms, source, target)
        if move is None:
            raise PlanMismatchError(f"{group.key}: {source} -> {target} is not a single step")
        where = tensor, atoms, source, target, move, mesh, cluster.device
        ns, host = move_ns(*where, sharing=shared), move_host_ns(*where, sharing=shared)
        num_bytes, _ = buffer_bytes(tensor, atoms, source, target, move, mesh.sizes)
        yield PricedStep(move.kind, move.axis, num_bytes, ns, host)
