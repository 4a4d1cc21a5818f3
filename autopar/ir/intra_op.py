"""What an op sends while it runs, if an exchanged factor of it (`v@` in a rule) is sharded.

A softmax over a sharded dim needs the largest score and the sum of all ranks; a lookup in a sharded
table needs nothing but to know which rows it holds. What such an op reduces is one value per *row*,
a row being what its first input has along the exchanged dims; each value is reduced over every
axis that shards an exchanged factor, the last axis first. A joint factor has an exchange of its
own: in ring attention keys and values go round. This list is what is priced, and code generation
emits exactly it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir import moe
from autopar.ir.attention import BACKWARD, FORWARD, RING, is_causal
from autopar.ir.choices import Choice, joint_axes, shardings
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.redistribute import local_shape

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
    "aten._embedding_bag.default": (),
    "aten._embedding_bag_forward_only.default": (),
    "aten.nll_loss_forward.default": (),
    "aten.nll_loss2d_forward.default": (),
    "aten.nll_loss_backward.default": (),
    "aten.nll_loss2d_backward.default": (),
    moe.FORWARD: (),
    moe.BACKWARD: (),
    FORWARD: (),
    BACKWARD: (),
}
"""Per op with exchanged factors, how it reduces its rows, in order."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective `kind` over mesh axis `axis`, of `in_bytes` on each rank that become
    `out_bytes`. An all-reduce is by `reduce`. `behind` is the part of the op's own compute that
    runs while it is under way."""

    kind: str
    axis: int
    in_bytes: int
    out_bytes: int
    reduce: str = ""
    behind: float = 0.0


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


def _ring(call: JointCall) -> tuple[Exchange, ...]:
    """Keys and values, passed on by every rank but in the last of the `call.size` steps. Each
    transfer has the compute on the block at hand to hide behind."""
    num_bytes = sum(tensor.num_bytes for tensor in call.inputs[1:3])
    blocks = _blocks(call)[:-1]
    return tuple(
        Exchange("permute", call.axis, num_bytes, num_bytes, behind=block) for block in blocks
    )


def _ring_backward(call: JointCall) -> tuple[Exchange, ...]:
    """Keys and values as forward, before each block but the last; after each but the first, what
    the ranks add up of their gradients, which ends where the keys are at home. Where both are under
    way they share the link; the very last transfer has no block to hide behind."""
    there = sum(tensor.num_bytes for tensor in call.inputs[2:4])
    back = sum(tensor.num_bytes for tensor in call.outputs[1:3])
    last = call.size - 1
    room = [block / max(1, (k < last) + (k > 1)) for k, block in enumerate(_blocks(call))]
    found: list[Exchange] = []
    for step in range(call.size):
        if step < last:
            found.append(Exchange("permute", call.axis, there, there, behind=room[step]))
        if step > 0:
            behind = room[step + 1] if step < last else 0.0
            found.append(Exchange("permute", call.axis, back, back, behind=behind))
    return tuple(found)


def _blocks(call: JointCall) -> list[float]:
    """What part of the op's compute each step has, on the rank that has most: under a causal mask
    the last one, whose first block is cut in half."""
    own = 0.5 if is_causal(call.node) else 1.0
    total = own + call.size - 1
    return [own / total, *((1 / total,) * (call.size - 1))]


JOINT: dict[tuple[str, str], Callable[[JointCall], tuple[Exchange, ...]]] = {
    **{(op, "exchange"): _experts for op in sorted(moe.OPS)},
    (FORWARD, RING): _ring,
    (BACKWARD, RING): _ring_backward,
}
"""Per op and name of a joint factor, what it sends."""


def _ring_scratch(call: JointCall) -> int:
    """Two blocks of keys and values, the one at hand and the one that comes; what a block gives,
    and the sum, in the dtype of sums."""
    passed = sum(tensor.num_bytes for tensor in call.inputs[1:3])
    return 2 * passed + _result_and_sum(call.outputs[0])


def _ring_backward_scratch(call: JointCall) -> int:
    """As forward, with two blocks of gradients, and those of the block at hand."""
    passed = sum(tensor.num_bytes for tensor in call.inputs[2:4])
    return 2 * passed + 3 * passed + _result_and_sum(call.outputs[0])


def _result_and_sum(tensor: Local) -> int:
    return tensor.num_bytes + row_itemsize(tensor.dtype) * prod(tensor.shape)


JOINT_SCRATCH: dict[tuple[str, str], Callable[[JointCall], int]] = {
    (FORWARD, RING): _ring_scratch,
    (BACKWARD, RING): _ring_backward_scratch,
}
"""Per op and name of a joint factor, the bytes it holds besides its inputs and outputs."""


def exchange_axes(node: Node, choice: Choice) -> tuple[int, ...]:
    """The mesh axes on which `choice` shards an exchanged factor of `node`, in mesh order."""
    return choice.axes_of({f.name for f in node.factors if f.exchanged})


def exchanges(
    graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]
) -> tuple[Exchange, ...]:
    """What `node` sends under `choice` on a mesh of `sizes`, in order."""
    axes = exchange_axes(node, choice)
    if not axes:
        return ()
    joint = _joint_calls(graph, node, choice, sizes)
    found = [each for name, call in joint for each in JOINT[node.op, name](call)]
    rows = [axis for axis in reversed(axes) if axis not in {call.axis for _, call in joint}]
    num_bytes = _row_bytes(graph, node, choice, sizes) if rows else 0
    found.extend(
        Exchange("all_reduce", axis, num_bytes, num_bytes, reduce)
        for reduce in EXCHANGES[node.op]
        for axis in rows
    )
    return tuple(found)


def joint_name(option: str) -> str:
    """The name that a rule gave a joint factor: "exchange" of "exchange.1"."""
    return option.partition(".")[0]


def _joint_calls(
    graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]
) -> list[tuple[str, JointCall]]:
    """The joint factors that `choice` shards, by name, with what they are called on."""
    axes = joint_axes(node, choice)
    if not axes:
        return []
    inputs, outputs = (
        tuple(
            Local(t.dtype, local_shape(t, graph.atoms, s, sizes))
            for t, s in zip(types, side, strict=True)
        )
        for types, side in zip(
            (graph.input_types(node), node.outputs), shardings(node, choice), strict=True
        )
    )
    return [
        (joint_name(choice.options[axis]), JointCall(node, axis, sizes[axis], inputs, outputs))
        for axis in axes
    ]


def _row_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes of one value per row."""
    tensor = graph.type_of(node.inputs[0])
    local = local_shape(tensor, graph.atoms, shardings(node, choice)[0][0], sizes)
    dims = exchanged_dims(node)
    return row_itemsize(tensor.dtype) * prod(n for dim, n in enumerate(local) if dim not in dims)


def exchanged_dims(node: Node) -> frozenset[int]:
    """The dims of the first input that exchanged factors stand in."""
    slots = (f.inputs[0] for f in node.factors if f.exchanged and not f.members)
    return frozenset(slot[0] for slot in slots if slot is not None)


def row_itemsize(dtype: str) -> int:
    """Bytes per value that is reduced: sums are taken in float32, of float64 in float64."""
    return 8 if dtype == "float64" else 4


def scratch_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes that an op holds besides its inputs and outputs: experts what they make on the way, a
    ring its blocks, others the first input in the dtype of sums, once, while they reduce rows."""
    if node.op in moe.OPS:
        return moe.inner_bytes(graph, node, choice, sizes)
    joint = _joint_calls(graph, node, choice, sizes)
    held = sum(JOINT_SCRATCH[node.op, name](call) for name, call in joint)
    if not exchange_axes(node, choice) or not EXCHANGES[node.op]:
        return held
    tensor = graph.type_of(node.inputs[0])
    local = local_shape(tensor, graph.atoms, shardings(node, choice)[0][0], sizes)
    return held + row_itemsize(tensor.dtype) * prod(local)
