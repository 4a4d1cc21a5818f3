"""What microbatches, stages and rounding add to a graph (`ir.passes.microbatches`,
`ir.passes.stages`, `ir.passes.rounding`), written in ops of torch.

The number of the microbatch is an input of the graph, as are the sums so far: all microbatches but
the last have the same graph. It returns these sums, and `runtime.program.microbatch_run` passes
them to the next microbatch. Tensors from other stages are inputs of the graph, tensors for others
are outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from autopar.ir.graph import Graph, Node, Slot
from autopar.ir.own_ops import (
    ACCUMULATE,
    COLLECT,
    COUNT,
    MICROBATCH,
    RECEIVE,
    RESTORE,
    ROUND,
    SEND,
    SHARE,
)
from autopar.ir.redistribute import local_part_sizes
from autopar.ir.sharding import Sharding
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.program import MICROBATCH_INPUT, Sum

aten = torch.ops.aten

OWN_OPS = frozenset({MICROBATCH, SHARE, ACCUMULATE, COLLECT, COUNT, SEND, RECEIVE, ROUND, RESTORE})


def sum_name(node: Node) -> str:
    """The name of the input or output of a graph that is the sum at `node`."""
    return f"sum:{node.index}"


def received_name(node: Node) -> str:
    """The name of the input of a graph that another stage sends."""
    return f"received:{node.target}"


def sent_name(node: Node) -> str:
    """The name of the output of a graph that `node` sends to another stage."""
    return f"sent:{node.args[-1]}:{node.target}"


def inputs_of(node: Node, *, is_last: bool) -> tuple[str, ...]:
    """The further inputs of a graph that `node` needs."""
    if node.op == MICROBATCH:
        return (MICROBATCH_INPUT,)
    if node.op == RECEIVE:
        return (received_name(node),)
    if node.op == ACCUMULATE:
        return (sum_name(node),)
    return (MICROBATCH_INPUT, sum_name(node)) if node.op == COLLECT and is_last else ()


class OwnOps:
    """Writes autopar's own ops for a graph on a mesh of `sizes`, for the last microbatch or one
    before."""

    def __init__(self, graph: Graph, sizes: Sequence[int], *, is_last: bool) -> None:
        self.graph, self.sizes, self.is_last = graph, sizes, is_last

    def write(
        self,
        graph: LeanGraph,
        node: Node,
        x: Sequence[fx.Node],
        inputs: dict[str, fx.Node],
        states: tuple[tuple[Sharding, ...], tuple[Sharding, ...]],
    ) -> fx.Node:
        """The output of `node` for inputs `x`; `states` are the shardings of its inputs and
        outputs."""
        if node.op == RECEIVE:
            return inputs[received_name(node)]
        if node.op == SEND:
            return graph.call(aten.contiguous.default, x[0])
        if node.op == ACCUMULATE:
            return graph.call(aten.add_.Tensor, inputs[sum_name(node)], x[0])
        if node.op == SHARE:
            return graph.call(aten.div.Scalar, x[0], self.graph.microbatches)
        if node.op == COUNT:
            return _count(graph, node, x)
        if node.op in (ROUND, RESTORE):
            return _cast(graph, node, x[0])
        if node.op == COLLECT and not self.is_last:
            return x[0]
        (input_state, *_), (output_state,) = states
        lead, rest = self._around(node, output_state if node.op == COLLECT else input_state)
        microbatch, microbatches = inputs[MICROBATCH_INPUT], self.graph.microbatches
        if node.op == MICROBATCH:
            rows = graph.call(aten.reshape.default, x[0], [lead, microbatches, rest])
            result = graph.call(aten.index_select.default, rows, 1, microbatch)
        else:
            rows = graph.call(aten.reshape.default, x[0], [lead, 1, rest])
            whole = inputs[sum_name(node)]
            result = graph.call(aten.index_copy_.default, whole, 1, microbatch, rows)
        return graph.call(aten.reshape.default, result, self._shape(node, output_state))

    def sum_of(self, node: Node, state: Sharding) -> Sum:
        """The sum at `node`, in sharding `state`, that each microbatch passes to the next."""
        shape, is_collected = tuple(self._shape(node, state)), node.op != ACCUMULATE
        if is_collected:
            lead, rest = self._around(node, state)
            shape = lead, self.graph.microbatches, rest
        return Sum(sum_name(node), node.phase.value, shape, node.outputs[0].dtype, is_collected)

    def _shape(self, node: Node, state: Sharding) -> list[int]:
        tensor, atoms = node.outputs[0], self.graph.atoms
        return [prod(sizes) for sizes in local_part_sizes(tensor, atoms, state, self.sizes)]

    def _around(self, node: Node, state: Sharding) -> tuple[int, int]:
        """How many elements stand before and behind the part that counts microbatches, on one
        rank."""
        is_cut = node.op == MICROBATCH
        tensor = self.graph.input_types(node)[0] if is_cut else node.outputs[0]
        other = node.outputs[0] if is_cut else self.graph.input_types(node)[0]
        dim, part = _microbatch_slot(tensor.parts, other.parts)
        sizes = local_part_sizes(tensor, self.graph.atoms, state, self.sizes)
        lead = prod(prod(each) for each in sizes[:dim]) * prod(sizes[dim][:part])
        rest = prod(sizes[dim][part + 1 :]) * prod(prod(each) for each in sizes[dim + 1 :])
        return lead, rest


def _microbatch_slot(whole: Sequence[Sequence[int]], cut: Sequence[Sequence[int]]) -> Slot:
    """The part that a tensor of the whole batch has, and that of a microbatch has not."""
    for dim, (parts, left) in enumerate(zip(whole, cut, strict=True)):
        if len(parts) > len(left):
            pairs = enumerate(zip(parts, left, strict=False))
            return dim, next((k for k, (a, b) in pairs if a != b), len(left))
    raise AssertionError("a tensor of the whole batch has a part more")


def _cast(graph: LeanGraph, node: Node, x: fx.Node) -> fx.Node:
    """`x` in the dtype of what `node` makes. Values beyond the range of float16 become its largest
    number, not infinity, so that gradients stay finite."""
    dtype = getattr(torch, node.outputs[0].dtype)
    cast = graph.call(aten._to_copy.default, x, dtype=dtype)
    if dtype is torch.float16:
        largest = torch.finfo(dtype).max
        cast = graph.call(aten.clamp_.default, cast, -largest, largest)
    return cast


def _count(graph: LeanGraph, node: Node, x: Sequence[fx.Node]) -> fx.Node:
    """How many targets are not ignored, or the sum of the weights of their classes."""
    ignored = node.args[-1]
    assert isinstance(ignored, int)
    counted = graph.call(aten.ne.Scalar, x[0], ignored)
    if len(x) == 1:
        counts = graph.call(aten.sum.default, counted)
        dtype = getattr(torch, node.outputs[0].dtype)
        return graph.call(aten._to_copy.default, counts, dtype=dtype)
    safe = graph.call(aten.mul.Tensor, x[0], counted)
    flat = graph.call(aten.reshape.default, safe, [-1])
    weights = graph.call(aten.index_select.default, x[1], 0, flat)
    flags = graph.call(aten.reshape.default, counted, [-1])
    return graph.call(aten.sum.default, graph.call(aten.mul.Tensor, weights, flags))
