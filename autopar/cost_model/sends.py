"""What the stages of a pipeline send each other, and how long that is under way: between them in
every microbatch, and what several of them share at the end of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autopar.cluster.mesh_shapes import axis_over
from autopar.cluster.parts import axis_of_copies
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.moves import to_ns
from autopar.ir.draws import STATE_BYTES
from autopar.ir.graph import Graph, Ref, Role
from autopar.ir.mesh import Axis, Cluster
from autopar.ir.redistribute import local_bytes
from autopar.ir.stages import SEND, link_of
from autopar.plans.estimates import Delay, Shared
from autopar.plans.layout import Layout

RESULTS, RANDOM_STATE, TIED = "results", "state of random numbers", "gradients of tied weights"

_WHOLE = (Role.LOSS, Role.VALUE, Role.MUTATION)
"""The results that all ranks have whole: others stay where they are."""

Tied = Mapping[str, tuple[Collection[int], int]]
"""The stages that use a weight, and bytes of its gradient on a device, by name."""


def delays(layouts: Sequence[Layout], line: Axis | None) -> tuple[Delay, ...]:
    """Per pair of stages and phase: bytes of a device of the stage that sends, for a microbatch,
    and nanoseconds. `layouts` are those of the stages, `line` what joins them, None where all are
    on one rank; each tensor is a message of its own, as a permutation along it."""
    found: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for stage, layout in enumerate(layouts):
        graph = layout.graph
        for node in graph.nodes:
            if node.op == SEND:
                link, (state,) = link_of(node, stage), layout.pair(node)[0]
                tensor = graph.type_of(node.inputs[0])
                size = local_bytes(tensor, graph.atoms, state, layout.mesh.sizes)
                total = found[link.source, link.target, link.phase.value]
                total[0] += size
                if line is not None:
                    total[1] += to_ns(collective_s("permute", size, size, line))
    return tuple(Delay(*hop, *total) for hop, total in sorted(found.items()))


def tied_in(layouts: Sequence[Layout]) -> Tied:
    """The weights that several stages use."""
    stages: dict[str, list[int]] = defaultdict(list)
    for stage, layout in enumerate(layouts):
        for node in layout.graph.with_role(Role.GRAD):
            stages[node.target].append(stage)
    # All of them store it alike.
    return {
        name: (found, gradient_bytes(layouts[found[0]], name))
        for name, found in stages.items()
        if len(found) > 1
    }


def gradient_bytes(layout: Layout, name: str) -> int:
    """Bytes of a device of the gradient of a parameter."""
    node = next(n for n in layout.graph.with_role(Role.PARAM) if n.target == name)
    return layout.held_bytes(Ref(node.index), layout.params[name].storage)


def shared_at_end(
    graph: Graph, tied: Tied, rank_of: Mapping[int, int], cluster: Cluster
) -> tuple[Shared, ...]:
    """What ranks of a pipeline over `cluster` share of the step `graph` when all microbatches are
    done, in the order in which they do: `rank_of` says on which of them each stage is. A result
    goes to all as in a ring, which passes on what an all_gather does; the gradients of a weight
    are added up among the ranks that have it."""
    if len(rank_of) == 1:
        return ()
    ranks = sorted(set(rank_of.values()))
    everyone = axis_over("world", cluster.num_devices, 1, cluster)
    found = [
        _shared(kind, ranks, sizes, "all_gather", everyone)
        for kind, sizes in ((RESULTS, _results(graph)), (RANDOM_STATE, _states(graph, cluster)))
    ]
    sums: dict[tuple[int, ...], list[int]] = {}
    for _, (stages, num_bytes) in sorted(tied.items()):
        places = tuple(sorted({rank_of[stage] for stage in stages}))
        sums.setdefault(places, []).append(num_bytes)
    devices = cluster.num_devices // len(ranks)
    for places, sizes in sums.items():
        if len(places) > 1:
            axis = axis_of_copies(cluster, [place * devices for place in places])
            found.append(_shared(TIED, places, sizes, "all_reduce", axis))
    return tuple(each for each in found if each.count)


def _shared(
    kind: str, ranks: Sequence[int], sizes: Iterable[int], collective: str, axis: Axis
) -> Shared:
    own = list(sizes)
    time_ns = sum(to_ns(collective_s(collective, size, size, axis)) for size in own)
    return Shared(kind, tuple(ranks), len(own), sum(own), time_ns)


def _results(graph: Graph) -> Iterator[int]:
    """Bytes of each result of a step that all ranks have."""
    for node in graph.with_role(*_WHOLE):
        yield graph.type_of(node.inputs[0]).num_bytes


def _states(graph: Graph, cluster: Cluster) -> Iterator[int]:
    """Bytes of the state of random numbers, if the step draws any: a GPU's is its seed and how far
    it has come."""
    if any(node.random for node in graph.nodes):
        yield STATE_BYTES if cluster.device.kind == "cpu" else 16
