"""Attention, `autopar::sdpa` and its backward (`runtime/ops/attention.py`).

Queries may be sharded along the sequence, over one mesh axis or several (letter `s`), with all keys
on every rank. Or queries, keys and values are sharded together over one axis (`RING`), whose ranks
then pass keys and values on from one to the next (`codegen/ops/attention.py`).

Under a causal mask the rows of a sequence do unequal work: of n shards the last has a share of
(2n - 1)/n^2, not 1/n (`last_share`), and the step takes as long as its rank. Shards but the first
see earlier keys without a mask and their own block with one: two kernels, whose results are merged.
In a ring there is one kernel per block, whose results are added up.

In zig-zag order all ranks do equal work (`ZIGZAG`, `RING_ZIGZAG`, over one axis). Rank r and its
mirror n - 1 - r swap the second halves of their shards inside the op (`codegen/ops/zigzag.py`). Of
2n chunks each rank then has the k-th and the k-th from the end, as in Megatron-LM's context
parallelism. Results are swapped back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from autopar.ir.choices import Choice, joint_axes, num_shards, shardings
from autopar.ir.graph import Arg, Graph, Node, Ref, Slot
from autopar.ir.redistribute import local_bytes
from autopar.rules.notation import Call, Dim, Dims, Rule, TensorShape, linear, place, rule
from autopar.rules.op import (
    DimName,
    Exchange,
    Family,
    Joint,
    JointCall,
    Op,
    Scores,
    Work,
    row_itemsize,
)

FORWARD = "autopar.sdpa.default"
BACKWARD = "autopar.sdpa_backward.default"

QUERIES = "s"
RING = "ring"
ZIGZAG = "s_zigzag"
RING_ZIGZAG = "ring_zigzag"

_SEQUENCE = 2

_CAUSAL_AT = {FORWARD: 4, BACKWARD: 7}

_FIRST = {FORWARD: 0, BACKWARD: 1}
"""The first of queries, keys and values among the inputs."""

_PER_SCORE = {FORWARD: 4.0, BACKWARD: 10.0}
"""FLOPs per (batch, head, query, key, head dim): two matmuls forward, five backward (the scores are
recomputed), as Dao et al., "FlashAttention" (2022), count them."""

_HEADS = (
    DimName(0, 1, "heads", ("kv", "g")),
    DimName(0, 3, "head_dim", ("hd0", "hd1")),
    DimName(2, 3, "head_dim", ("hd0", "hd1")),
)


def attention(call: Call) -> Rule:
    """autopar.sdpa(q, k, v, mask, is_causal, scale) -> (out, lse), and autopar.sdpa_backward(grad,
    q, k, v, out, lse, mask, is_causal, scale) -> (dq, dk, dv). Query rows are parallel; under a
    causal mask the op must know which ones it has. Grouped heads share a key-value head: q has
    (kv g), k and v have kv. Without a mask tensor, keys and values may go round a ring."""
    first, causal = _FIRST[call.op], _CAUSAL_AT[call.op]
    q, k, v, out, lse, sizes, whole = _attention_dims(call, first)
    mask = _mask_dims(call, call.arg(causal - 1), q, k)
    forward = call.op == FORWARD
    given = (q, k, v, mask) if forward else (out, q, k, v, out, lse, mask)
    positional, joint = _sequence(call, call.arg(causal - 1), first, causal=bool(call.arg(causal)))
    return rule(
        place(call, dict(enumerate(given))),
        [out, lse] if forward else [q, k, v],
        whole=whole,
        sizes=sizes,
        positional=positional,
        joint=joint,
        partial=() if forward else linear(call, (call.arg(0),)),
    )


def _sequence(
    call: Call, mask: Arg, q: int, *, causal: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """(positional letters, joint factors) of attention whose queries are input `q`. A causal ring
    has as many keys as queries: each block of keys is then before, at or after that of queries."""
    square = call.shapes[q][2] == call.shapes[q + 1][2]
    if isinstance(mask, Ref) or (causal and not square):
        return (QUERIES,) if causal else (), ()
    ring = ((RING, (QUERIES, "t")),)
    if not causal:
        return (), ring
    return (QUERIES,), (*ring, (ZIGZAG, (QUERIES,)), (RING_ZIGZAG, (QUERIES, "t")))


def _attention_dims(
    call: Call, at: int
) -> tuple[Dims, Dims, Dims, Dims, Dims, dict[str, int], set[str]]:
    heads, groups = call.shapes[at][1], call.shapes[at + 1][1]
    head: Dim = ("h",) if heads == groups else ("kv", "g")
    shared: Dim = head[:1]
    return (
        (("b",), head, ("s",), ("d",)),
        (("b",), shared, ("t",), ("d",)),
        (("b",), shared, ("t",), ("e",)),
        (("b",), head, ("s",), ("e",)),
        (("b",), head, ("s",)),
        {} if heads == groups else {"kv": groups, "g": heads // groups},
        {"t", "d", "e"},
    )


def _mask_dims(call: Call, mask: Arg, q: Dims, k: Dims) -> Dims:
    """A mask is [batch or 1, heads or 1, queries or 1, keys], or lacks leading dims."""
    full = (q[0], q[1], q[2], k[2])
    shape = call.shape(mask)
    return tuple(
        () if size == 1 else dim for size, dim in zip(shape, full[4 - len(shape) :], strict=True)
    )


def is_causal(node: Node) -> bool:
    """Whether a row s of an attention op attends to columns 0..s alone."""
    return bool(node.args[_CAUSAL_AT[node.op]])


def query_ranks(choice: Choice, sizes: Sequence[int]) -> int:
    """The number of ranks over which `choice` shards the queries one after the other."""
    cut = {option for option in choice.options if option.partition(".")[0] in (QUERIES, RING)}
    return choice.num_parts(cut, sizes)


def _joint_option(node: Node, choice: Choice) -> str:
    """The joint factor that `choice` uses; "" for none."""
    axes = joint_axes(node, choice)
    return choice.options[axes[0]].partition(".")[0] if axes else ""


def last_share(queries: int, keys: int, num_parts: int) -> float:
    """The part of all causal scores in the last of `num_parts` shards of the rows, which has most:
    (2 n - 1) / n^2 for n shards where there are as many keys as queries."""
    first = queries - queries // num_parts
    return (_seen(queries, keys) - _seen(first, keys)) / _seen(queries, keys)


def _seen(rows: int, keys: int) -> int:
    """The number of scores in the first `rows` rows: row s has s + 1, and at most one per key."""
    short = min(rows, keys)
    return short * (short + 1) // 2 + (rows - short) * keys


def _flops(node: Node, graph: Graph) -> float:
    """FLOPs of attention. Causal attention computes half of the scores."""
    query, key = _shapes(node, graph)
    return _PER_SCORE[node.op] * (0.5 if is_causal(node) else 1.0) * prod(query) * key[-2]


def _shapes(node: Node, graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the queries and of the keys."""
    query, key, *_ = (tensor.shape for tensor in graph.input_types(node)[_FIRST[node.op] :])
    return query, key


def _work(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> Work:
    flops = _flops(node, graph) * _busiest_share(node, graph, choice, sizes)
    joint, num = _joint_option(node, choice), num_shards(node, choice, sizes)
    if not joint and not (is_causal(node) and query_ranks(choice, sizes) > 1):
        return Work(flops, scores=_scores(graph, node, num, 1))
    merged = _merged_bytes(graph, node, choice, sizes)
    copied = _reordered_bytes(graph, node, choice, sizes) if joint in (ZIGZAG, RING_ZIGZAG) else 0
    if joint in (RING, RING_ZIGZAG):
        steps = sizes[joint_axes(node, choice)[0]]
        scores = _scores(graph, node, num, steps)
        return Work(flops, steps, steps - 1, 1, merged, copied, scores)
    # Two kernels for rows that follow one another: one for the shard, or one for each half of it.
    scores = _scores(graph, node, num, 2)
    if joint:
        scores = replace(scores, rows=scores.rows // 2, passes=4)
    return Work(flops, merges=1, merged_bytes=merged, copied_bytes=copied, scores=scores)


def _scores(graph: Graph, node: Node, num: int, steps: int) -> Scores:
    """The scores of one of `steps` kernels, where `num` ranks share the work."""
    query, key = _shapes(node, graph)
    return Scores(
        rows=prod(query[:-1]) // num,
        keys=key[-2] // steps,
        head_dim=query[-1],
        per_score=_PER_SCORE[node.op],
        causal=is_causal(node),
        backward=node.op == BACKWARD,
        passes=steps,
        added=isinstance(node.args[_CAUSAL_AT[node.op] - 1], Ref),
    )


def _busiest_share(node: Node, graph: Graph, choice: Choice, sizes: Sequence[int]) -> float:
    num = num_shards(node, choice, sizes)
    if not is_causal(node):
        return 1 / num
    query, key = _shapes(node, graph)
    num_parts = query_ranks(choice, sizes)
    return last_share(query[-2], key[-2], num_parts) * num_parts / num


def _merged_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes read and written to merge the result of one more kernel: the result is read, the sum is
    read and written. The sum of the first output is in the dtype of sums."""
    total = 0
    for output, sharding in zip(node.outputs, shardings(node, choice)[1], strict=True):
        held = local_bytes(output, graph.atoms, sharding, sizes)
        summed = (
            held * row_itemsize(output.dtype) * prod(output.shape) // output.num_bytes
            if output is node.outputs[0]
            else held
        )
        total += held + 2 * summed
    return total


def _reordered_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes read and written to bring tensors in zig-zag order and back: half of each is packed to
    be sent, and all of it is joined with what came."""
    sides = zip((graph.input_types(node), node.outputs), shardings(node, choice), strict=True)
    slots = _slots(node, _joint_option(node, choice))
    return sum(
        3 * local_bytes(tensor, graph.atoms, sharding, sizes)
        for (types, placed), there in zip(sides, slots, strict=True)
        for tensor, sharding, slot in zip(types, placed, there, strict=True)
        if slot is not None
    )


def _slots(node: Node, name: str) -> tuple[tuple[Slot | None, ...], tuple[Slot | None, ...]]:
    """Where the factor of this `name` stands in inputs and outputs."""
    (factor,) = (factor for factor in node.factors if factor.name == name)
    return factor.inputs, factor.outputs


def _swaps(call: JointCall, side: int) -> Iterator[Exchange]:
    """The messages between mirrors, of inputs (side 0) or outputs (1) that have rows: one for all
    of a dtype."""
    tensors, slots = (call.inputs, call.outputs)[side], _slots(call.node, call.name)[side]
    given: dict[str, int] = {}
    for tensor, slot in zip(tensors, slots, strict=True):
        if slot is not None:
            given[tensor.dtype] = given.get(tensor.dtype, 0) + _second_half_bytes(tensor)
    for num_bytes in given.values():
        yield Exchange("permute", call.axis, num_bytes, num_bytes)


def _zigzag(call: JointCall) -> Iterator[Exchange]:
    """The messages of rows in zig-zag order: halves of what has rows, before the op and after."""
    yield from _swaps(call, 0)
    yield from _swaps(call, 1)


def _ring_zigzag(call: JointCall) -> Iterator[Exchange]:
    """The messages of a ring in zig-zag order."""
    yield from _swaps(call, 0)
    yield from _ring(call)
    yield from _swaps(call, 1)


def _second_half_bytes(tensor: TensorShape) -> int:
    """Bytes of the rows that a rank swaps: of an odd number of rows the smaller half."""
    length = tensor.shape[_SEQUENCE]
    return tensor.num_bytes // length * (length // 2)


def _ring(call: JointCall) -> Iterator[Exchange]:
    """The messages of a ring. Keys and values are passed on before each block but the last. In
    backward, the sums of their gradients are passed on after each block but the first, and end on
    the rank of the keys. A transfer hides behind the compute on the current block. Where both are
    in flight they share the link. The last transfer of gradients has no block to hide behind."""
    first, last = _FIRST[call.node.op], call.size - 1
    backward = call.node.op == BACKWARD
    there = sum(tensor.num_bytes for tensor in call.inputs[first + 1 : first + 3])
    back = sum(tensor.num_bytes for tensor in call.outputs[1:3])
    room = [
        block / max(1, (k < last) + (backward and k > 1)) for k, block in enumerate(_blocks(call))
    ]
    for step in range(call.size):
        if step < last:
            yield Exchange("permute", call.axis, there, there, behind=room[step])
        if backward and step > 0:
            behind = room[step + 1] if step < last else 0.0
            yield Exchange("permute", call.axis, back, back, behind=behind)


def _blocks(call: JointCall) -> list[float]:
    """The part of the op's compute in each step, on the rank that has most. With a causal mask that
    is the last rank, half of whose first block is masked. In zig-zag order half of each block
    is."""
    own = 0.5 if is_causal(call.node) and call.name == RING else 1.0
    total = own + call.size - 1
    return [own / total, *((1 / total,) * (call.size - 1))]


def _ring_scratch(call: JointCall) -> int:
    """Bytes of a ring's buffers: two blocks of keys and values, the current and the coming one, the
    result of a block, and in the dtype of sums the sum, the next one, and in forward what is added
    to it. In backward also two blocks of gradients, and the gradients of the current block."""
    first, result = _FIRST[call.node.op], call.outputs[0]
    passed = sum(tensor.num_bytes for tensor in call.inputs[first + 1 : first + 3])
    blocks, sums = (2, 3) if call.node.op == FORWARD else (5, 2)
    summed = row_itemsize(result.dtype) * prod(result.shape)
    return blocks * passed + result.num_bytes + sums * summed


def _zigzag_scratch(call: JointCall) -> int:
    """Bytes of rows in zig-zag order: halves that are sent and that come, results of both halves,
    and in backward the gradients of keys and values from each."""
    rows = _reordered(call, 0) + _reordered(call, 1)
    if call.node.op == FORWARD:
        return 2 * rows
    return 2 * (rows + sum(tensor.num_bytes for tensor in call.outputs[1:]))


def _ring_zigzag_scratch(call: JointCall) -> int:
    """Bytes of a ring in zig-zag order: of a ring, and inputs in that order. They are parts of one
    and a half times themselves: of both halves, and the first one again."""
    inputs = _reordered(call, 0) * 3 // 2
    return inputs + max(inputs, _ring_scratch(call))


def _reordered(call: JointCall, side: int) -> int:
    """Bytes of the inputs (side 0) or outputs (1) that have rows."""
    tensors, slots = (call.inputs, call.outputs)[side], _slots(call.node, call.name)[side]
    pairs = zip(tensors, slots, strict=True)
    return sum(tensor.num_bytes for tensor, slot in pairs if slot is not None)


_JOINT = {
    RING: Joint(_ring, _ring_scratch),
    ZIGZAG: Joint(_zigzag, _zigzag_scratch),
    RING_ZIGZAG: Joint(_ring_zigzag, _ring_zigzag_scratch),
}

ATTENTION: Family = (
    (
        Op(
            attention,
            _flops,
            work=_work,
            joint=_JOINT,
            dim_names=_HEADS,
            sequential=True,
        ),
        FORWARD,
    ),
    (Op(attention, _flops, work=_work, joint=_JOINT), BACKWARD),
)
