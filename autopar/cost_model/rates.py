"""What a plan says beside its times: what a cluster can do, in whole numbers, how much of it a step
uses, and what ops read and make, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import prod, sqrt

from autopar.cost_model.moves import to_ns
from autopar.ir.copies import is_copy
from autopar.ir.graph import Graph, Node, Role, TensorType
from autopar.ir.mesh import Cluster, Device, Link
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, root_key
from autopar.plans.cluster_rates import ClusterRates, CollectiveRates, LinkRates
from autopar.plans.layout import Layout
from autopar.rules.work import flops, is_contraction

_TOKENS = ("int32", "int64")
_MIB = 2**20


def cluster_rates(cluster: Cluster) -> ClusterRates:
    """The figures that prices are made of."""
    device = cluster.device
    return ClusterRates(
        device=device.name,
        source=device.source,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=round(device.memory_bytes_per_s),
        flops_per_s={dtype: round(rate) for dtype, rate in device.flops_per_s},
        kernels=_kernels(device),
        links=tuple(
            LinkRates(
                name=level.link.name,
                size=level.size,
                bytes_per_s=round(level.link.bytes_per_s),
                latency_ns=to_ns(level.link.latency_s),
                start_ns=to_ns(level.link.start_s),
                efficiency_ppm=round(level.link.efficiency * 1e6),
                measured=_measured(level.link),
            )
            for level in cluster.levels
        ),
    )


def _kernels(device: Device) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, figure in asdict(device.kernels).items():
        if name.endswith("_s"):
            found[name.removesuffix("s") + "ns"] = to_ns(device.floor_s(figure))
        else:
            found[f"{name}_ppm"] = round(figure * 1e6)
    if device.host_launch_s:
        found["launch_ns"] = to_ns(device.host_launch_s)
    return found


def _measured(link: Link) -> tuple[CollectiveRates, ...]:
    found: list[CollectiveRates] = []
    for curve in link.curves:
        rate = curve.reach * link.bytes_per_s
        root_ns = to_ns(curve.knee * sqrt(curve.start_s * _MIB / rate))
        start_ns = to_ns(curve.start_s)
        found.append(
            CollectiveRates(curve.kind, curve.ranks, start_ns, round(rate), root_ns, curve.shared)
        )
    return tuple(found)


def tokens_of(graph: Graph) -> int:
    """Elements of the largest input that is a batch of sequences of numbers; 0 if there is none."""
    found = [node.outputs[0] for node in graph.with_role(Role.INPUT)]
    return max(
        (prod(x.shape) for x in found if x.dtype in _TOKENS and len(x.shape) == 2), default=0
    )


def utilisation_ppm(graph: Graph, cluster: Cluster, computed: Iterable[int], step_ns: int) -> int:
    """The model's FLOPs in a step over what the devices could do meanwhile: contractions alone,
    each against the peak of its dtype, nothing counted twice that is done twice (model FLOPs
    utilisation, as in "PaLM", arXiv 2204.02311, appendix B)."""
    done: dict[str, float] = defaultdict(float)
    for index in computed:
        node = graph.nodes[index]
        if is_contraction(node.op) and node.inputs and not is_copy(node):
            done[graph.type_of(node.inputs[0]).dtype] += graph.turns * flops(node, graph)
    ideal_s = sum(done[d] / cluster.device.peak(d) for d in sorted(done)) / cluster.num_devices
    return round(ideal_s / (step_ns * 1e-9) * 1e6) if step_ns else 0


Words = tuple[tuple[str, str], ...]
Reads = Mapping[tuple[int, int], tuple[Group, Sharding]]


def reads(layout: Layout, all_groups: Sequence[Group]) -> Reads:
    """Per (node, tensor input): the group it belongs to, and the state its root is in for that."""
    return {
        (use.node, use.arg): (group, state)
        for group in all_groups
        for use, state in zip(group.uses, layout.asked(group), strict=True)
    }


def inputs(layout: Layout, node: Node, found: Reads) -> Words:
    """(key of the root, the sharding it is in to be read) of each tensor input."""
    read = (found[node.index, arg] for arg in range(len(node.inputs)))
    return tuple((root_key(layout.graph, group.root), str(state)) for group, state in read)


def outputs(layout: Layout, node: Node) -> Words:
    """(type, sharding) of each output; a parameter's sharding is how it is stored."""
    if node.role is Role.PARAM:
        return ((type_text(node.outputs[0]), str(layout.params[node.target].storage)),)
    states = layout.pair(node)[1]
    return tuple((type_text(t), str(state)) for t, state in zip(node.outputs, states, strict=True))


def type_text(tensor: TensorType) -> str:
    """`bfloat16[64, 4096]`"""
    return f"{tensor.dtype}{list(tensor.shape)}"
