"""A local graph in the making, with the messages of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from autopar.codegen.collectives import WAIT, ChunkPacking, Packing, collective_call, parts_of
from autopar.codegen.passes import apply_passes
from autopar.codegen.torch_private import unwritten
from autopar.ir.graph import Role
from autopar.ir.schedule import HostCopy, Message, Transfer, Value
from autopar.ir.sharding import Sharding
from autopar.plans.layout import Layout, Move
from autopar.runtime.ops.host_copies import ARRIVED, LANDED, OFFLOAD, RELOAD
from autopar.runtime.process.stack_lines import FOR
from autopar.runtime.program.lean import LeanGraph

# The messages of a schedule in a local graph: transfers on their own, and buckets of them.
#
# A reduce_scatter's input has a row per rank, and so has an all_gather's output. Each transfer of a
# bucket is seen as such rows, or as one row for other collectives. The rows of all are joined, and
# a transfer is a range of columns of the result. NCCL and gloo can both do that; gloo's own
# coalesced reduce_scatter sends its members one by one.

aten = torch.ops.aten

MEMBERS = "members"
"""Where the meta of a collective's node has how many tensors it carries."""


class Messages:
    """Writes transfers into the local graph of one phase."""

    def __init__(self, layout: Layout, graph: LeanGraph, spoken: Callable[[Transfer], str]) -> None:
        self.layout = layout
        self.graph = graph
        self.spoken = spoken
        self._axes, self._sizes = layout.mesh, layout.mesh.sizes
        self._packings: dict[tuple[str, int], Packing | ChunkPacking] = {}
        self._issued: dict[Message, fx.Node] = {}
        self._slices: dict[Transfer, fx.Node | _BufferSlice] = {}

    def start(self, message: Message, given: list[fx.Node]) -> None:
        """The collective, for `given`, the local sources of the transfers, or the copy."""
        if message.kind in ("offload", "reload"):
            self._copy(message, *given)
            return
        pairs = zip(message.transfers, given, strict=True)
        x, *others = packed = [self._packing(transfer).pack(x) for transfer, x in pairs]
        axis = self._axes[message.axis]
        if others:
            rows = axis.size if message.kind == "reduce_scatter" else 1
            flat = [self._reshape(x, [rows, -1]) for x in packed]
            x = self.graph.call(aten.cat.default, flat, 1)
        target, behind = collective_call(message.kind, axis.size, axis.name)
        issued = self.graph.call(target, x, *behind)
        issued.meta[MEMBERS] = len(packed)
        more = f" and {len(others)} more" if others else ""
        issued.meta[FOR] = f"{self.spoken(message.transfers[0])}{more}"
        self._issued[message] = issued

    def wait(self, message: Message) -> None:
        """The collective, or the copy, is over."""
        issued, first = self._issued.pop(message), message.transfers[0]
        if issued.target in (OFFLOAD, RELOAD):
            copy = first.collective
            is_read_there = isinstance(copy, HostCopy) and copy.is_read_there
            self.graph.call(LANDED if is_read_there else ARRIVED, issued)
            self._slices[first] = issued
            return
        landed = self.graph.call(WAIT, issued)
        if len(message.transfers) == 1:
            self._slices[first] = landed
            return
        rows = self._axes[message.axis].size if message.kind == "all_gather" else 1
        start = 0
        for transfer in message.transfers:
            packing = self._packing(transfer)
            assert isinstance(packing, Packing), "chunks travel alone"
            shape = list(packing.landed_shape)
            end = start + prod(shape) // rows
            self._slices[transfer] = _BufferSlice(landed, start, end, shape)
            start = end

    def take(self, transfer: Transfer) -> fx.Node:
        """The tensor that a transfer brings, from the result of its collective."""
        landed = self._slices.pop(transfer)
        if isinstance(landed, _BufferSlice):
            landed = self._cut_out(landed)
        if isinstance(transfer.collective, HostCopy):
            return landed
        return self._packing(transfer).unpack(landed)

    def _copy(self, message: Message, x: fx.Node) -> None:
        """Start a copy of `x` to the host, or back to the device of graphs (`bind`)."""
        is_reload = message.kind == "reload"
        target, device = (RELOAD, (torch.device("cpu"),)) if is_reload else (OFFLOAD, ())
        self._issued[message] = self.graph.call(target, x, *device)

    def cut(self, transfer: Transfer, x: fx.Node) -> fx.Node:
        """The rank's slice of `x`."""
        shard = self._packing(transfer).cut(x)
        root = self.layout.graph.nodes[transfer.source.ref.node]
        if root.role is not Role.OP or shard.target is aten.reshape.default:
            return self.graph.call(aten.contiguous.default, shard)
        # A view would keep the whole tensor in memory; a part of a dim is copied by reshape.
        return self.graph.call(aten.clone.default, shard, memory_format=torch.contiguous_format)

    def _packing(self, transfer: Transfer) -> Packing | ChunkPacking:
        known = transfer.key, transfer.step
        if known not in self._packings:
            self._packings[known] = self._find_packing(transfer)
        return self._packings[known]

    def _find_packing(self, transfer: Transfer) -> Packing | ChunkPacking:
        graph, collective = self.layout.graph, transfer.collective
        assert not isinstance(collective, HostCopy), "copies are not packed"
        tensor = graph.type_of(transfer.source.ref)
        move = Move(transfer.source.state, transfer.target.state)
        if collective.chunks:
            return ChunkPacking.of(self.graph, tensor, graph.atoms, self._axes, move, collective)
        before, after = (parts_of(tensor, graph.atoms, state, self._sizes) for state in move)
        axis = self._axes[collective.axis]
        return Packing(self.graph, axis.name, axis.size, before, after, collective)

    def _cut_out(self, columns: _BufferSlice) -> fx.Node:
        """One transfer's columns, contiguous, in the shape in which they were received."""
        part = self.graph.call(aten.slice.Tensor, columns.landed, 1, columns.start, columns.end)
        if columns.end - columns.start == 1:
            # Of a single column reshape makes a view, which some kernels read as if it had no gaps.
            part = self.graph.call(aten.contiguous.default, part)
        return self._reshape(part, columns.shape)

    def _reshape(self, x: fx.Node, shape: list[int]) -> fx.Node:
        return self.graph.call(aten.reshape.default, x, shape)


class _BufferSlice(NamedTuple):
    """Columns of a bucket's result, and the shape of their tensor."""

    landed: fx.Node
    start: int
    end: int
    shape: list[int]


class LocalGraph:
    """One of the graphs of a microbatch while it is written, with its inputs and outputs by name.
    `views` has the local value of each view, by node, sharding, and whether it is on the host."""

    def __init__(self, layout: Layout, spoken: Callable[[Transfer], str]) -> None:
        self.graph = LeanGraph()
        self.messages = Messages(layout, self.graph, spoken)
        self.inputs: dict[str, fx.Node] = {}
        self.outputs: dict[str, fx.Node] = {}
        self.values: dict[Value, fx.Node] = {}
        self.views: dict[tuple[int, Sharding, bool], fx.Node] = {}

    def placeholder(self, name: str) -> fx.Node:
        """A further input, behind the others."""
        identifier = f"{''.join(c if c.isalnum() else '_' for c in name)}__{len(self.inputs)}"
        self.inputs[name] = self.graph.placeholder(identifier)
        return self.inputs[name]

    def module(self, gm: fx.GraphModule, outputs: Sequence[str]) -> fx.GraphModule:
        """The graph, which returns these outputs; its constants are those of `gm`."""
        self.graph.output(tuple(self.outputs[name] for name in outputs))
        return unwritten(gm, apply_passes(self.graph))
