"""What an op computes, and what it sends while it runs, by its record."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, joint_axes, num_shards, shardings
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.redistribute import local_bytes, local_shape
from autopar.ir.sharding import Sharding
from autopar.rules.notation import TensorShape
from autopar.rules.op import Exchange, Joint, JointCall, Shapes, Work, row_itemsize
from autopar.rules.table import OPS, record_of


def is_contraction(op: str) -> bool:
    """Whether the arithmetic of an op may take longer than its memory traffic."""
    return record_of(op).flops is not None


def fuses(op: str) -> bool:
    """Whether a backend fuses an op with neighbours of the same kind into one kernel, if it does
    not draw random numbers."""
    return not (is_contraction(op) or record_of(op).embedding_lookup)


def reduces(node: Node) -> bool:
    """Whether an op that fuses reduces a dim of one of its inputs."""
    return bool(record_of(node.op).row_reductions) or any(
        any(f.inputs) and None in f.outputs for f in node.factors if not f.members
    )


def flops(node: Node, graph: Graph) -> float:
    """Floating-point operations of `node` on all devices together, two per multiplication and
    addition."""
    count = record_of(node.op).flops
    return count(node, graph) if count else float(sum(prod(t.shape) for t in node.outputs))


def busiest_work(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> Work:
    """The work of the busiest rank in `node` under `choice` on a mesh of `sizes`."""
    work = record_of(node.op).work
    if work is None:
        return Work(flops(node, graph) / num_shards(node, choice, sizes))
    return work(graph, node, choice, sizes)


def inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes on one rank of the intermediate tensors of `node`."""
    count = record_of(node.op).inner_bytes
    return count(graph, node, choice, sizes) if count else 0


def read_bytes(
    graph: Graph,
    node: Node,
    shardings: tuple[Sequence[Sharding], Sequence[Sharding]],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Bytes that `node` reads of each tensor input on one rank: all of the local tensor, or only
    what is picked from it. `shardings` are those of the inputs and of the outputs."""
    types = graph.input_types(node), node.outputs
    pairs = zip(types[0], shardings[0], strict=True)
    held = [local_bytes(tensor, graph.atoms, sharding, sizes) for tensor, sharding in pairs]
    reads = record_of(node.op).reads
    if reads is not None:
        local = (
            tuple(
                local_shape(tensor, graph.atoms, sharding, sizes)
                for tensor, sharding in zip(side, states, strict=True)
            )
            for side, states in zip(types, shardings, strict=True)
        )
        whole = (tuple(tensor.shape for tensor in side) for side in types)
        for position, elements in reads(Shapes(*whole, *local)).items():
            held[position] = min(held[position], elements * itemsize(types[0][position].dtype))
    return tuple(held)


# What an op sends while it runs, if an exchanged factor of it (`d@` or `v#` in a rule) is sharded.
#
# A softmax over a sharded dim needs the largest score and the sum over all ranks; a lookup in a
# sharded table only needs to know which rows it holds. Such an op reduces one value per *row*: the
# elements of its first input along the exchanged dims. Each value is reduced over every axis that
# shards an exchanged factor, the last axis first. A joint factor has an exchange of its own: in
# ring attention keys and values go round. These messages are priced, and code generation emits
# exactly them.

_ROW_VALUES = 5
"""The most values per row that an op holds while it reduces them."""


def exchange_axes(node: Node, choice: Choice) -> tuple[int, ...]:
    """The mesh axes on which `choice` shards an exchanged factor of `node`, in mesh order."""
    return choice.axes_of({f.name for f in node.factors if f.exchanged})


def exchanges(
    graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]
) -> tuple[Exchange, ...]:
    """The messages of `node` under `choice` on a mesh of `sizes`, in order."""
    axes = exchange_axes(node, choice)
    if not axes:
        return ()
    joint = _joint_calls(graph, node, choice, sizes)
    messages = [each for factor, call in joint for each in factor.sends(call)]
    rows = [axis for axis in reversed(axes) if axis not in {call.axis for _, call in joint}]
    num_bytes = _row_bytes(graph, node, choice, sizes) if rows else 0
    messages.extend(
        Exchange("all_reduce", axis, num_bytes, num_bytes, reduce)
        for reduce in OPS[node.op].row_reductions
        for axis in rows
    )
    return tuple(messages)


def joint_factors(node: Node, choice: Choice) -> tuple[tuple[int, str], ...]:
    """(mesh axis, name in the rule) of the joint factors that `choice` uses: "exchange" for
    "exchange.1"."""
    axes = joint_axes(node, choice)
    return tuple((axis, choice.options[axis].partition(".")[0]) for axis in axes)


def _joint_calls(
    graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]
) -> list[tuple[Joint, JointCall]]:
    """The joint factors that `choice` shards, each with its call."""
    used = joint_factors(node, choice)
    if not used:
        return []
    inputs, outputs = (
        tuple(
            TensorShape(local_shape(t, graph.atoms, s, sizes), t.dtype)
            for t, s in zip(types, side, strict=True)
        )
        for types, side in zip(
            (graph.input_types(node), node.outputs), shardings(node, choice), strict=True
        )
    )
    return [
        (OPS[node.op].joint[name], JointCall(node, name, axis, sizes[axis], inputs, outputs))
        for axis, name in used
    ]


def _row_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes of one value per row."""
    at = OPS[node.op].rows_of
    tensor, dtype = graph.type_of(node.inputs[at]), graph.type_of(node.inputs[0]).dtype
    local = local_shape(tensor, graph.atoms, shardings(node, choice)[0][at], sizes)
    dims = exchanged_dims(node, at)
    return row_itemsize(dtype) * prod(n for dim, n in enumerate(local) if dim not in dims)


def exchanged_dims(node: Node, at: int = 0) -> frozenset[int]:
    """The dims of input `at` that have exchanged factors."""
    slots = (f.inputs[at] for f in node.factors if f.exchanged and not f.members)
    return frozenset(slot[0] for slot in slots if slot is not None)


def scratch_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes that an op holds besides its inputs and outputs: its intermediate tensors (experts, a
    ring), copies of the first input while rows are reduced, and a copy of the result of a lookup
    while the rows of other ranks are masked."""
    joint = _joint_calls(graph, node, choice, sizes)
    held = inner_bytes(graph, node, choice, sizes)
    held += sum(factor.scratch_bytes(call) for factor, call in joint)
    if not exchange_axes(node, choice):
        return held
    record = OPS[node.op]
    inputs, outputs = shardings(node, choice)
    if record.row_reductions:
        tensor = graph.type_of(node.inputs[0])
        size = prod(local_shape(tensor, graph.atoms, inputs[0], sizes))
        unit = row_itemsize(tensor.dtype)
        copies = record.row_copies[itemsize(tensor.dtype) < unit]
        held += round(copies * unit * size) + _ROW_VALUES * _row_bytes(graph, node, choice, sizes)
    elif record.embedding_lookup:
        # With where each index lies among the rank's rows.
        held += local_bytes(node.outputs[0], graph.atoms, outputs[0], sizes)
        held += 2 * local_bytes(graph.type_of(node.inputs[1]), graph.atoms, inputs[1], sizes)
    return held
