"""What an op sends while it runs, if an exchanged factor of it (`v@` in a rule) is sharded.

A softmax over a sharded dim needs the largest score and the sum of all ranks; a lookup in a sharded
table needs nothing but to know which rows it holds. What such an op reduces is one value per *row*,
a row being what its first input has along the exchanged dims; each value is reduced over every
axis that shards an exchanged factor, the last axis first. This list is what is priced, and code
generation emits exactly it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from autopar import moe
from autopar.graph import Graph, Node, itemsize
from autopar.reshard import local_shape
from autopar.strategy import shardings

EXCHANGES: dict[str, tuple[str, ...]] = {
    "aten._log_softmax.default": ("max", "sum"),
    "aten._softmax.default": ("max", "sum"),
    "aten.logsumexp.default": ("max", "sum"),
    "aten._log_softmax_backward_data.default": ("sum",),
    "aten._softmax_backward_data.default": ("sum",),
    "aten.native_layer_norm.default": ("sum", "sum"),
    "aten.native_layer_norm_backward.default": ("sum", "sum"),
    "aten._fused_rms_norm.default": ("sum",),
    "aten._fused_rms_norm_backward.default": ("sum",),
    "aten.embedding.default": (),
    "aten.embedding_dense_backward.default": (),
    "aten.nll_loss_forward.default": (),
    "aten.nll_loss2d_forward.default": (),
    "aten.nll_loss_backward.default": (),
    "aten.nll_loss2d_backward.default": (),
    moe.FORWARD: (),
    moe.BACKWARD: (),
}
"""Per op with exchanged factors, how it reduces its rows, in order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective `kind` over mesh axis `axis`, of `in_bytes` on each rank that become
    `out_bytes`. An all-reduce is by `reduce`."""

    kind: str
    axis: int
    in_bytes: int
    out_bytes: int
    reduce: str = ""


@dataclass(frozen=True, slots=True)
class Local:
    """A tensor on one rank."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class JointCall:
    """An op under a joint factor that is sharded over mesh axis `axis` of `size` ranks, and its
    tensors on each."""

    node: Node
    axis: int
    size: int
    inputs: tuple[Local, ...]
    outputs: tuple[Local, ...]


def _experts(call: JointCall) -> tuple[Exchange, ...]:
    tensors = [(t.dtype, t.shape) for t in call.inputs]
    return tuple(
        Exchange("all_to_all", call.axis, num_bytes, num_bytes)
        for num_bytes in moe.message_bytes(call.node, tensors, call.size)
    )


JOINT: dict[tuple[str, str], Callable[[JointCall], tuple[Exchange, ...]]] = {
    (op, "exchange"): _experts for op in sorted(moe.OPS)
}
"""Per op and name of a joint factor, what it sends."""


def exchange_axes(node: Node, choice: str) -> tuple[int, ...]:
    """The mesh axes on which `choice` shards an exchanged factor of `node`, in mesh order."""
    names = {f.name for f in node.factors if f.exchanged}
    options = choice.split(",") if names and choice else ()
    return tuple(axis for axis, option in enumerate(options) if option in names)


def exchanges(graph: Graph, node: Node, choice: str, sizes: Sequence[int]) -> tuple[Exchange, ...]:
    """What `node` sends under `choice` on a mesh of `sizes`, in order."""
    axes = exchange_axes(node, choice)
    if not axes:
        return ()
    asked, left = shardings(node, choice)
    inputs = tuple(
        Local(t.dtype, local_shape(t, graph.atoms, s, sizes))
        for t, s in zip(graph.input_types(node), asked, strict=True)
    )
    outputs = tuple(
        Local(t.dtype, local_shape(t, graph.atoms, s, sizes))
        for t, s in zip(node.outputs, left, strict=True)
    )
    options = choice.split(",")
    joint = {f.name for f in node.factors if f.members}
    found: list[Exchange] = []
    for axis in axes:
        if options[axis] in joint:
            call = JointCall(node, axis, sizes[axis], inputs, outputs)
            found.extend(JOINT[node.op, joint_name(options[axis])](call))
    rows = tuple(axis for axis in reversed(axes) if options[axis] not in joint)
    num_bytes = _row_bytes(node, inputs[0])
    found.extend(
        Exchange("all_reduce", axis, num_bytes, num_bytes, reduce)
        for reduce in EXCHANGES[node.op]
        for axis in rows
    )
    return tuple(found)


def joint_name(option: str) -> str:
    """The name that a rule gave a joint factor: "exchange" of "exchange.1"."""
    return option.partition(".")[0]


def _row_bytes(node: Node, first: Local) -> int:
    """Bytes of one value per row."""
    dims = exchanged_dims(node)
    rows = prod(size for dim, size in enumerate(first.shape) if dim not in dims)
    return row_itemsize(first.dtype) * rows


def exchanged_dims(node: Node) -> frozenset[int]:
    """The dims of the first input that exchanged factors stand in."""
    slots = (f.inputs[0] for f in node.factors if f.exchanged and not f.members)
    return frozenset(slot[0] for slot in slots if slot is not None)


def row_itemsize(dtype: str) -> int:
    """Bytes per value that is reduced: sums are taken in float32, of float64 in float64."""
    return 8 if dtype == "float64" else 4


def scratch_bytes(graph: Graph, node: Node, choice: str, sizes: Sequence[int]) -> int:
    """Bytes that an op holds besides its inputs and outputs: experts what they make on the way,
    others the first input in the dtype of sums, once, while they reduce rows."""
    if node.op in moe.OPS:
        return moe.inner_bytes(graph, node, choice, sizes)
    if not exchange_axes(node, choice) or not EXCHANGES[node.op]:
        return 0
    tensor = graph.type_of(node.inputs[0])
    local = local_shape(tensor, graph.atoms, shardings(node, choice)[0][0], sizes)
    return row_itemsize(tensor.dtype) * prod(local)
