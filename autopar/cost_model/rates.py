"""What a cluster can do, in whole numbers, and how much of it a step uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

from autopar.cost_model.moves import to_ns
from autopar.ir.graph import Graph, Role
from autopar.ir.mesh import Cluster
from autopar.plans.plan import ClusterRates, LinkRates
from autopar.rules.work import flops, is_contraction

_TOKENS = ("int32", "int64")


def cluster_rates(cluster: Cluster) -> ClusterRates:
    """The figures that prices are made of."""
    device = cluster.device
    return ClusterRates(
        device=device.name,
        source=device.source,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=round(device.memory_bytes_per_s),
        flops_per_s={dtype: round(rate) for dtype, rate in device.flops_per_s},
        links=tuple(
            LinkRates(
                name=level.link.name,
                size=level.size,
                bytes_per_s=round(level.link.bytes_per_s),
                latency_ns=to_ns(level.link.latency_s),
                start_ns=to_ns(level.link.start_s),
            )
            for level in cluster.levels
        ),
    )


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
        if is_contraction(node.op) and node.inputs:
            done[graph.type_of(node.inputs[0]).dtype] += flops(node, graph)
    ideal_s = sum(done[d] / cluster.device.peak(d) for d in sorted(done)) / cluster.num_devices
    return round(ideal_s / (step_ns * 1e-9) * 1e6) if step_ns else 0
