"""Figures and texts of a plan file beside its times: the rates of the cluster in whole numbers, how
much of them a step uses, and the inputs and outputs of ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod, sqrt

from autopar.cost_model.moves import to_ns
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, TensorType, per_graph
from autopar.ir.mesh import Cluster, Device, Link
from autopar.ir.own_ops import is_copy
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, root_key, root_of
from autopar.plans.cluster_rates import ClusterRates, CollectiveRates, LinkRates
from autopar.plans.layout import Layout
from autopar.rules.notation import is_floating
from autopar.rules.table import record_of
from autopar.rules.work import flops, is_contraction

_TOKENS = ("int32", "int64")
_MIB = 2**20


def cluster_rates(cluster: Cluster) -> ClusterRates:
    """The figures of a cluster from which prices are computed."""
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
                measured=tuple(_measured(level.link)),
            )
            for level in cluster.levels
        ),
    )


def _kernels(device: Device) -> dict[str, int]:
    figures: dict[str, int] = {}
    for name, figure in asdict(device.kernels).items():
        if name.endswith("_s"):
            figures[name.removesuffix("s") + "ns"] = to_ns(device.floor_s(figure))
        else:
            figures[f"{name}_ppm"] = round(figure * 1e6)
    if device.host_launch_s:
        figures["launch_ns"] = to_ns(device.host_launch_s)
    return figures


def _measured(link: Link) -> Iterator[CollectiveRates]:
    for curve in link.curves:
        rate = curve.reach * link.bytes_per_s
        root_ns = to_ns(curve.knee * sqrt(curve.start_s * _MIB / rate))
        start_ns = to_ns(curve.start_s)
        yield CollectiveRates(curve.kind, curve.ranks, start_ns, round(rate), root_ns, curve.shared)


def rate_unit(graph: Graph) -> tuple[int, int]:
    """(tokens, samples) of a step, of which one is 0: speed is in tokens if the model's inputs are
    token sequences, else in samples.

    An input is a token sequence if it has integers [batch, sequence] that are indices of an
    embedding table. In a model that gets embeddings [batch, sequence, width], it may be the targets
    of a loss instead, one for each position. Positions of a sequence also interact:
    there is attention or recurrence over that many, or a loss for each or for all but one of them.
    So columns of categories [batch, columns] are no sequence, nor are labels of images. With
    floating-point inputs of other dims (images, audio features), speed is in samples. Samples are
    the size of dim 0 of the first input that has dims.
    """
    inputs = graph.with_role(Role.INPUT)
    shapes = [node.outputs[0].shape for node in inputs if node.outputs[0].shape]
    samples = shapes[0][0] if shapes else 0
    numbers = [x.outputs[0].shape for x in inputs if is_floating(x.outputs[0].dtype)]
    counts = [
        prod(shape)
        for node in inputs
        for shape in (node.outputs[0].shape,)
        if node.outputs[0].dtype in _TOKENS
        and len(shape) == 2
        and all(len(n) < 2 or shape[1] in n for n in numbers)
        and _is_sequence(graph, shape)
        and (node.index in _looked_up(graph) or any(n[:-1] == shape for n in numbers))
    ]
    return (max(counts), 0) if counts else (0, samples)


@per_graph
def _looked_up(graph: Graph) -> frozenset[int]:
    """The inputs that are indices of embedding tables, without ops on them before."""
    nodes = (
        _given(graph, ref)
        for node in graph.with_role(Role.OP)
        if record_of(node.op).embedding_lookup and node.phase is Phase.FORWARD
        for ref in node.inputs[1:]
    )
    return frozenset(node.index for node in nodes if node.role is Role.INPUT)


def _given(graph: Graph, ref: Ref) -> Node:
    """The node that a tensor is a view of; for rows of a microbatch, that of the whole batch."""
    node = graph.nodes[root_of(graph, ref)[0].node]
    if graph.microbatches == 1 or node.role is not Role.OP or len(node.inputs) != 1:
        return node
    rows, *rest = graph.type_of(node.inputs[0]).shape or (0,)
    is_part = node.outputs[0].shape == (rows // graph.microbatches, *rest)
    return graph.nodes[root_of(graph, node.inputs[0])[0].node] if is_part else node


def _is_sequence(graph: Graph, shape: tuple[int, ...]) -> bool:
    """Whether positions in dim 1 of an input of this shape interact, or each has a loss."""
    batch, length = shape
    targets = {batch * length, batch * (length - 1)}
    for node in graph.with_role(Role.OP):
        record, given = record_of(node.op), graph.input_types(node)
        if record.sequential and any(length in x.shape for x in given if len(x.shape) > 2):
            return True
        if record.scores_targets:
            scored = (prod(x.shape) * graph.microbatches for x in given if x.dtype in _TOKENS)
            if any(count in targets for count in scored):
                return True
    return False


def utilisation_ppm(graph: Graph, cluster: Cluster, computed: Iterable[int], step_ns: int) -> int:
    """Model FLOPs utilisation of a step, in millionths ("PaLM", arXiv 2204.02311, appendix B).
    FLOPs of contractions alone count, each against the peak of its dtype; recomputed ops do not
    count again."""
    ideal_s = peak_s(graph, cluster, computed)
    return round(ideal_s / (step_ns * 1e-9) * 1e6) if step_ns else 0


def peak_s(graph: Graph, cluster: Cluster, computed: Iterable[int]) -> float:
    """Seconds of the FLOPs of contractions at the peak of all devices."""
    done: dict[str, float] = defaultdict(float)
    for index in computed:
        node = graph.nodes[index]
        if is_contraction(node.op) and node.inputs and not is_copy(node):
            done[graph.type_of(node.inputs[0]).dtype] += graph.microbatches * flops(node, graph)
    return sum(done[d] / cluster.device.peak(d) for d in sorted(done)) / cluster.num_devices


Words = tuple[tuple[str, str], ...]
Reads = Mapping[tuple[int, int], tuple[Group, Sharding]]


def reads(layout: Layout, all_groups: Sequence[Group]) -> Reads:
    """Per (node, tensor input): its group, and the sharding of the root for that use."""
    return {
        (use.node, use.arg): (group, state)
        for group in all_groups
        for use, state in zip(group.uses, layout.use_states(group), strict=True)
    }


def inputs(layout: Layout, node: Node, reads: Reads) -> Words:
    """(key of the root, sharding in which it is read) of each tensor input."""
    read = (reads[node.index, arg] for arg in range(len(node.inputs)))
    return tuple((root_key(layout.graph, group.root), str(state)) for group, state in read)


def outputs(layout: Layout, node: Node) -> Words:
    """(type, sharding) of each output; a parameter's sharding is its storage."""
    if node.role is Role.PARAM:
        return ((type_text(node.outputs[0]), str(layout.params[node.target].storage)),)
    states = layout.pair(node)[1]
    return tuple((type_text(t), str(state)) for t, state in zip(node.outputs, states, strict=True))


def type_text(tensor: TensorType) -> str:
    """`bfloat16[64, 4096]`"""
    return f"{tensor.dtype}{list(tensor.shape)}"
