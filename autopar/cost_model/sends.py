"""Bytes and times of communication between pipeline stages: messages of every microbatch, and
collectives among ranks at the end of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from autopar.cluster.mesh_shapes import axis_over
from autopar.cluster.parts import axis_between, axis_of_copies
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.event_prices import round_up
from autopar.cost_model.moves import to_ns
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, itemsize
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Axis, Cluster
from autopar.ir.own_ops import RECEIVE, SEND, is_end
from autopar.ir.passes.recompute import STATE_BYTES
from autopar.ir.passes.stages import StageLink, link_of
from autopar.ir.pipeline import Hop
from autopar.ir.redistribute import OnMesh, holders, local_bytes, shard_pieces
from autopar.plans.estimates import Delay, Shared
from autopar.plans.layout import Layout

RESULTS, RANDOM_STATE, TIED = "results", "state of random numbers", "gradients of tied weights"

_WHOLE = (Role.LOSS, Role.VALUE, Role.MUTATION)
"""The results of which every rank gets the whole; others stay where they are."""

Tied = Mapping[str, tuple[Collection[int], int]]
"""By name of a tied weight, the stages that use it and bytes of its gradient on a device."""


class MessageBytes(NamedTuple):
    """Bytes along a hop for a microbatch, of a device that sends, and of one that receives."""

    sent: int
    received: int


def message_bytes(layouts: Sequence[Layout], granule_bytes: int) -> dict[Hop, MessageBytes]:
    """Bytes that stages send each other, each tensor rounded up to `granule_bytes`."""
    totals: dict[Hop, list[int]] = defaultdict(lambda: [0, 0])
    for stage, layout in enumerate(layouts):
        for node in layout.graph.nodes:
            if is_end(node):
                link, size = link_of(node, stage), round_up(_own_bytes(layout, node), granule_bytes)
                totals[link.source, link.target, link.phase][node.op == RECEIVE] += size
    return {hop: MessageBytes(*total) for hop, total in totals.items()}


def delays(layouts: Sequence[Layout], firsts: Sequence[int], cluster: Cluster) -> tuple[Delay, ...]:
    """Bytes of a device of the sending stage and nanoseconds, per pair of stages and phase, for a
    microbatch. The stages have these `layouts` and begin with the devices `firsts` of `cluster`.
    Each tensor is a message of its own. Stages on the same devices send nothing."""
    totals: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for source, layout in enumerate(layouts):
        for node in layout.graph.nodes:
            if node.op == SEND:
                link = link_of(node, source)
                size, most = _sent_bytes(layout, node, layouts[link.target], link)
                total = totals[link.source, link.target, link.phase.value]
                total[0] += size
                total[1] += hop_ns(most, firsts[source], firsts[link.target], firsts, cluster)
    return tuple(Delay(*hop, *total) for hop, total in sorted(totals.items()))


def hop_ns(
    num_bytes: int, source: int, target: int, firsts: Sequence[int], cluster: Cluster
) -> int:
    """Nanoseconds of a message of `num_bytes` from each device of one part of `cluster` to another,
    as a permutation among the parts. These begin with the devices `firsts`."""
    if source == target:
        return 0
    axis = axis_between(cluster, source, target, len({*firsts}))
    return to_ns(collective_s("permute", num_bytes, num_bytes, axis))


def sent_bytes(layout: Layout, phase: Phase) -> list[int]:
    """Bytes of a device of each message that a stage sends, in one phase of a microbatch."""
    return [_own_bytes(layout, n) for n in layout.graph.nodes if n.op == SEND and n.phase is phase]


def _own_bytes(layout: Layout, node: Node) -> int:
    """Bytes of a device of the tensor of a send or receive node."""
    is_sent, (inputs, outputs) = node.op == SEND, layout.pair(node)
    tensor = layout.graph.type_of(node.inputs[0]) if is_sent else node.outputs[0]
    (state,) = inputs if is_sent else outputs
    return local_bytes(tensor, layout.graph.atoms, state, layout.mesh.sizes)


def _sent_bytes(layout: Layout, node: Node, other: Layout, link: StageLink) -> tuple[int, int]:
    """Bytes of a device of a tensor that a stage sends to another, and the most bytes of it that a
    device of either sends or receives."""
    own, ((state,), _) = _own_bytes(layout, node), layout.pair(node)
    end = next(n for n in other.graph.nodes if n.op == RECEIVE and link_of(n, link.target) == link)
    (target,) = other.pair(end)[1]
    if layout.mesh.sizes == other.mesh.sizes and state == target:
        return own, own
    tensor, atoms = end.outputs[0], layout.graph.atoms
    held = holders(tensor, atoms, OnMesh(layout.mesh, state))
    out, come = Counter[int](), Counter[int]()
    for device in range(other.mesh.num_devices):
        for part in shard_pieces(
            held, OnMesh(other.mesh, target).box(tensor, atoms, device), device
        ):
            size = itemsize(tensor.dtype) * prod(b - a for a, b in part.box)
            out[part.source] += size
            come[device] += size
    return own, max((*out.values(), *come.values()))


def tied_in(layouts: Sequence[Layout]) -> Tied:
    """The tied weights, which several stages use."""
    stages = grouped(
        (node.target, stage)
        for stage, layout in enumerate(layouts)
        for node in layout.graph.with_role(Role.GRAD)
    )
    # All stages store a tied weight alike.
    return {
        name: (users, gradient_bytes(layouts[users[0]], name))
        for name, users in stages.items()
        if len(users) > 1
    }


def gradient_bytes(layout: Layout, name: str) -> int:
    """Bytes of a parameter's gradient on a device."""
    node = next(n for n in layout.graph.with_role(Role.PARAM) if n.target == name)
    return layout.held_bytes(Ref(node.index), layout.params[name].storage)


def shared_at_end(
    graph: Graph,
    tied: Tied,
    rank_of: Mapping[int, int],
    cluster: Cluster,
    firsts: Sequence[int],
) -> tuple[Shared, ...]:
    """Communication among ranks of a pipeline over `cluster` after the last microbatch, in order.
    `graph` is the step, `rank_of` the rank of each stage, and ranks begin with the devices
    `firsts`. A result goes to all ranks, priced as an all_gather in a ring. The gradients of a tied
    weight are summed among the ranks that have it."""
    if 1 in (len(rank_of), cluster.num_devices):
        return ()
    ranks = sorted(set(rank_of.values()))
    everyone = axis_over("world", cluster.num_devices, 1, cluster)
    shared = [
        _shared(kind, ranks, sizes, "all_gather", everyone)
        for kind, sizes in ((RESULTS, _results(graph)), (RANDOM_STATE, _states(graph, cluster)))
    ]
    sums = grouped(
        (tuple(sorted({rank_of[stage] for stage in stages})), num_bytes)
        for _, (stages, num_bytes) in sorted(tied.items())
    )
    for places, sizes in sums.items():
        if len(places) > 1:
            axis = axis_of_copies(cluster, [firsts[place] for place in places])
            shared.append(_shared(TIED, places, sizes, "all_reduce", axis))
    return tuple(each for each in shared if each.count)


def _shared(
    kind: str, ranks: Sequence[int], sizes: Iterable[int], collective: str, axis: Axis
) -> Shared:
    own = list(sizes)
    time_ns = sum(to_ns(collective_s(collective, size, size, axis)) for size in own)
    return Shared(kind, tuple(ranks), len(own), sum(own), time_ns)


def _results(graph: Graph) -> Iterator[int]:
    """Bytes of each result of a step that every rank gets."""
    return (graph.type_of(node.inputs[0]).num_bytes for node in graph.with_role(*_WHOLE))


def _states(graph: Graph, cluster: Cluster) -> Iterator[int]:
    """Bytes of the generator's state, if the step draws random numbers; on a GPU a seed and an
    offset."""
    if any(node.random for node in graph.nodes):
        yield STATE_BYTES if cluster.device.kind == "cpu" else 16
