"""Faults in the steps that move a tensor from one sharding to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import fx

from autopar.codegen.bucketing import Bucket
from autopar.codegen.bucketing import _rows as rows
from autopar.codegen.collectives import Emitter
from autopar.ir.redistribute import Collective
from tests.codegen.test_collectives import test_every_step
from tests.faults.table import by_test, fault, verified

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Patch = pytest.MonkeyPatch


def instead(
    patch: Patch, kind: str, write: Callable[[Emitter, fx.Node, Collective], fx.Node]
) -> None:
    """`write` stands for the emitter of steps of `kind`."""
    original = Emitter.emit

    def emitted(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        return write(self, x, move) if move.kind == kind else original(self, x, move)

    patch.setattr(Emitter, "emit", emitted)


def reduced(self: Emitter, x: fx.Node, how: str, axis: str) -> fx.Node:
    return self._wait(c10d.all_reduce.default, self._contiguous(x), how, axis)


@fault(verified("data parallel"))
def all_reduce_left_out(patch: Patch) -> None:
    instead(patch, "all_reduce", lambda self, x, move: self._contiguous(x))


@fault(verified("data parallel"))
def all_reduce_twice(patch: Patch) -> None:
    instead(
        patch,
        "all_reduce",
        lambda self, x, move: reduced(self, reduced(self, x, "sum", self.axis), "sum", self.axis),
    )


@fault(verified("data parallel"))
def largest_for_the_sum(patch: Patch) -> None:
    instead(patch, "all_reduce", lambda self, x, move: reduced(self, x, "max", self.axis))


@fault(verified("tensor parallel"))
def all_reduce_over_the_other_axis(patch: Patch) -> None:
    other = {"dp": "tp", "tp": "dp"}
    instead(
        patch,
        "all_reduce",
        lambda self, x, move: reduced(self, x, "sum", other.get(self.axis, self.axis)),
    )


@fault(by_test(test_every_step, "b c", (2, 2)))
def gather_over_the_other_axis(patch: Patch) -> None:
    other = {"ax0": "ax1", "ax1": "ax0"}

    def gathered(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        twin = replace(self, axis=other[self.axis])
        return twin._all_gather(x, move.source.slot)

    instead(patch, "all_gather", gathered)


@fault(verified("zero"))
def scatter_of_the_pieces_in_reverse(patch: Patch) -> None:
    def scattered(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        dim, length = move.target.dim, self.after.shape[move.target.dim]
        turned = self._call(aten.roll.default, x, [length], [dim])
        return self._reduce_scatter(turned, move.target.slot)

    instead(patch, "reduce_scatter", scattered)


@fault(by_test(test_every_step, "b c", (2,)))
def gather_that_is_not_laid_out(patch: Patch) -> None:
    def gathered(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        wide = self._wait(
            c10d.all_gather_into_tensor.default, self._contiguous(x), self.num, self.axis
        )
        return self._call(aten.reshape.default, wide, list(self.after.shape))

    instead(patch, "all_gather", gathered)


@fault(by_test(test_every_step, "d (b c) a", (2,)))
def exchange_with_its_pieces_in_reverse(patch: Patch) -> None:
    def exchanged_pieces(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        dim = move.target.dim
        length = self.before.shape[dim] // self.num
        turned = self._call(aten.roll.default, x, [length], [dim])
        return self._all_to_all(turned, move.source.slot, move.target.slot)

    instead(patch, "all_to_all", exchanged_pieces)


@fault(verified("layers"))
def shard_that_begins_one_row_late(patch: Patch) -> None:
    def late(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        dim = move.target.dim
        return self._slice(self._call(aten.roll.default, x, [-1], [dim]), move.target.slot)

    instead(patch, "slice", late)


@fault(by_test(test_every_step, "(c a)", (2,)))
def slice_of_the_dim_for_one_of_its_parts(patch: Patch) -> None:
    def outer(self: Emitter, x: fx.Node, move: Collective) -> fx.Node:
        return self._slice(x, (move.target.dim, 0))

    instead(patch, "slice", outer)


@fault(verified("zero"))
def tensors_of_a_bucket_mixed_up(patch: Patch) -> None:
    """Two gradients of one shape come back under each other's name."""
    original = Bucket.pieces

    def mixed(self: Bucket, graph: fx.Graph, landed: fx.Node) -> Any:
        found = original(self, graph, landed)
        for one, other in combinations(found, 2):
            if found[one].shape == found[other].shape:
                return found | {one: found[other], other: found[one]}
        return found

    patch.setattr(Bucket, "pieces", mixed)


@fault(verified("zero"), silent=False)
def bucket_that_counts_its_ranks_wrong(patch: Patch) -> None:
    """What is scattered goes to ranks by position in the buffer, not tensor by tensor."""
    patch.setattr(
        "autopar.codegen.bucketing._rows",
        lambda node: (1, 1) if "reduce_scatter" in str(node.target) else rows(node),
    )
