"""Faults in the steps that move a tensor from one sharding to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import fx

from autopar.codegen import collectives, local_graph
from autopar.codegen.collectives import Packing
from autopar.codegen.local_graph import Messages, _BufferSlice
from autopar.ir.schedule import Message
from autopar.ir.sharding import S
from tests.codegen import test_collectives
from tests.codegen.test_collectives import test_every_step
from tests.faults.table import by_test, fault, verified

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Patch = pytest.MonkeyPatch


def packed_as(
    patch: Patch, kind: str, write: Callable[[Packing, fx.Node], fx.Node], method: str = "pack"
) -> None:
    """`write` stands for what steps of `kind` do before they send, or in place of `method`."""
    original = getattr(Packing, method)

    def packed(self: Packing, x: fx.Node) -> fx.Node:
        return write(self, x) if self.move.kind == kind else original(self, x)

    patch.setattr(Packing, method, packed)


def called_as(patch: Patch, change: Callable[[Any, tuple[Any, ...]], tuple[Any, Any]]) -> None:
    """`change` of the op of every collective and its arguments stands for them."""
    original = collectives.collective_call

    def collective_call(kind: str, num: int, axis: str) -> Any:
        return change(*original(kind, num, axis))

    for module in (collectives, local_graph, test_collectives):
        patch.setattr(module, "collective_call", collective_call)


def other(args: tuple[Any, ...], turned: dict[str, str]) -> tuple[Any, ...]:
    return (*args[:-1], turned.get(args[-1], args[-1]))


@fault(verified("data parallel"))
def all_reduce_left_out(patch: Patch) -> None:
    original = Messages.start

    def start(self: Messages, message: Message, given: list[fx.Node]) -> None:
        original(self, message, given)
        if message.kind == "all_reduce":
            self._issued[message] = self._issued[message].args[0]

    patch.setattr(Messages, "start", start)


@fault(verified("data parallel"))
def all_reduce_twice(patch: Patch) -> None:
    original = Messages.start

    def start(self: Messages, message: Message, given: list[fx.Node]) -> None:
        original(self, message, given)
        if message.kind == "all_reduce":
            once = self._issued[message]
            come = self.graph.call_function(c10d.wait_tensor.default, (once,))
            again = self.graph.call_function(once.target, (come, *once.args[1:]))
            self._issued[message] = again

    patch.setattr(Messages, "start", start)


@fault(verified("data parallel"))
def largest_for_the_sum(patch: Patch) -> None:
    called_as(
        patch,
        lambda op, args: (op, ("max", *args[1:]) if op is c10d.all_reduce.default else args),
    )


@fault(verified("tensor parallel"))
def all_reduce_over_the_other_axis(patch: Patch) -> None:
    turned = {"dp": "tp", "tp": "dp"}
    called_as(
        patch,
        lambda op, args: (op, other(args, turned) if op is c10d.all_reduce.default else args),
    )


@fault(by_test(test_every_step, "b c", (2, 2)))
def gather_over_the_other_axis(patch: Patch) -> None:
    turned = {"ax0": "ax1", "ax1": "ax0"}
    gather = c10d.all_gather_into_tensor.default
    called_as(patch, lambda op, args: (op, other(args, turned) if op is gather else args))


@fault(verified("zero"))
def scatter_of_the_pieces_in_reverse(patch: Patch) -> None:
    pack = Packing.pack

    def turned(self: Packing, x: fx.Node) -> fx.Node:
        dim = self.move.target.dim
        length = self.after.shape[dim]
        return pack(self, self.graph.call(aten.roll.default, x, [length], [dim]))

    packed_as(patch, "reduce_scatter", turned)


@fault(by_test(test_every_step, "b c", (2,)))
def gather_that_is_not_laid_out(patch: Patch) -> None:
    packed_as(
        patch,
        "all_gather",
        lambda self, x: self.graph.call(aten.reshape.default, x, list(self.after.shape)),
        "unpack",
    )


@fault(by_test(test_every_step, "d (b c) a", (2,)))
def exchange_with_its_pieces_in_reverse(patch: Patch) -> None:
    pack = Packing.pack

    def turned(self: Packing, x: fx.Node) -> fx.Node:
        dim = self.move.target.dim
        length = self.before.shape[dim] // self.num
        return pack(self, self.graph.call(aten.roll.default, x, [length], [dim]))

    packed_as(patch, "all_to_all", turned)


@fault(verified("layers"))
def shard_that_begins_one_row_late(patch: Patch) -> None:
    cut = Packing.cut
    packed_as(
        patch,
        "slice",
        lambda self, x: cut(
            self, self.graph.call(aten.roll.default, x, [-1], [self.move.target.dim])
        ),
        "cut",
    )


@fault(by_test(test_every_step, "(c a)", (2,)))
def slice_of_the_dim_for_one_of_its_parts(patch: Patch) -> None:
    cut = Packing.cut

    def outer(self: Packing, x: fx.Node) -> fx.Node:
        target = S(self.move.target.dim, 0)
        return cut(replace(self, move=replace(self.move, target=target)), x)

    packed_as(patch, "slice", outer, "cut")


@fault(verified("zero"))
def tensors_of_a_bucket_mixed_up(patch: Patch) -> None:
    """Two gradients of one shape come back under each other's name."""
    original = Messages.wait

    def mixed(self: Messages, message: Message) -> None:
        original(self, message)
        pieces = [(t, self._slices[t]) for t in message.transfers]
        for (one, a), (two, b) in combinations(pieces, 2):
            if isinstance(a, _BufferSlice) and isinstance(b, _BufferSlice) and a.shape == b.shape:
                self._slices |= {one: b, two: a}
                return

    patch.setattr(Messages, "wait", mixed)


@fault(verified("zero"), silent=False)
def bucket_that_counts_its_ranks_wrong(patch: Patch) -> None:
    """What is scattered goes to ranks by position in the buffer, not tensor by tensor."""
    original = Messages._reshape

    def in_one_row(self: Messages, x: fx.Node, shape: list[int]) -> fx.Node:
        return original(self, x, [1, -1] if shape[1:] == [-1] else shape)

    patch.setattr(Messages, "_reshape", in_one_row)
