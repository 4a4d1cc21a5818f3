"""Faults in the rules of ops, and in what choices mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.codegen.ops import peers
from autopar.cost_model import space
from autopar.ir import choices as strategy
from autopar.ir.graph import Node
from autopar.ir.sharding import P, R
from autopar.rules import work
from autopar.rules.notation import Call, Rule, parse_rule
from autopar.rules.pointwise import pointwise
from autopar.rules.reductions import reduction
from autopar.rules.table import OPS
from tests.faults.table import exchanged, fault, proved, retraced, verified

Patch = pytest.MonkeyPatch


def ruled(patch: Patch, op: str, rule: Any) -> None:
    """`rule` stands in the record of `op`."""
    patch.setitem(OPS, op, replace(OPS[op], rule=rule))


def changed(patch: Patch, op: str, change: Callable[[Call, Rule], Rule]) -> None:
    """Every rule of `op` goes through `change`."""
    entry: Any = OPS[op].rule
    ruled(patch, op, lambda call: change(call, entry(call)))


def no_longer_whole(patch: Patch, op: str, *letters: str) -> None:
    """`letters` may be sharded like any other."""
    changed(
        patch,
        op,
        lambda _, rule: replace(
            rule,
            whole=rule.whole - set(letters),
            permuted=rule.permuted - set(letters),
            positional=rule.positional - set(letters),
        ),
    )


@fault(retraced("layers"), silent=False)
def product_with_the_second_factor_turned(patch: Patch) -> None:
    ruled(patch, "aten.mm.default", "m k, n k -> m n")


@fault(proved("aten.bmm.default"))
def product_of_two_partial_matrices(patch: Patch) -> None:
    line = replace(parse_rule("b m k, b k n -> b m n"), partial=((0, 1),))
    ruled(patch, "aten.bmm.default", lambda _: line)


@fault(proved("aten._softmax.default"))
def softmax_of_each_piece(patch: Patch) -> None:
    no_longer_whole(patch, "aten._softmax.default", *(f"d{k}" for k in range(4)))


@fault(proved("aten.native_layer_norm.default"), silent=False)
def layer_norm_of_each_piece(patch: Patch) -> None:
    no_longer_whole(patch, "aten.native_layer_norm.default", *(f"d{k}" for k in range(4)))


@fault(proved("aten.native_group_norm.default"), silent=False)
def group_norm_with_statistics_of_each_piece(patch: Patch) -> None:
    no_longer_whole(patch, "aten.native_group_norm.default", "d0", "d1")


@fault(proved("aten.amax.default"))
def largest_of_each_piece_added_up(patch: Patch) -> None:
    ruled(patch, "aten.amax.default", reduction("sum"))


@fault(proved("aten.mean.dim"))
def mean_taken_for_a_sum(patch: Patch) -> None:
    ruled(patch, "aten.mean.dim", reduction("sum"))


@fault(proved("aten.var.correction"))
def variance_taken_for_a_mean(patch: Patch) -> None:
    ruled(patch, "aten.var.correction", reduction("mean"))


@fault(proved("aten.relu.default"))
def relu_of_a_partial_sum(patch: Patch) -> None:
    ruled(patch, "aten.relu.default", pointwise("0"))


@fault(proved("aten.mul.Tensor"))
def product_of_two_partial_sums(patch: Patch) -> None:
    ruled(patch, "aten.mul.Tensor", pointwise("01"))


@fault(proved("aten.add.Tensor"))
def number_added_to_every_summand(patch: Patch) -> None:
    changed(patch, "aten.add.Tensor", lambda _, rule: replace(rule, partial=((0,),)))


@fault(proved("aten._to_copy.default"))
def rounding_of_a_partial_sum(patch: Patch) -> None:
    changed(patch, "aten._to_copy.default", lambda _, rule: replace(rule, partial=((0,),)))


@fault(proved("aten.addmm.default"))
def bias_added_by_every_rank(patch: Patch) -> None:
    no_longer_whole(patch, "aten.addmm.default", "k")


@fault(proved("aten.convolution.default"))
def convolution_bias_added_by_every_rank(patch: Patch) -> None:
    no_longer_whole(patch, "aten.convolution.default", "c")


@fault(proved("aten.cat.default"))
def joined_pieces_interleaved(patch: Patch) -> None:
    """The pieces of a join are its inner part, not its outer."""
    _turned(patch, "aten.cat.default", ("t", "h"))


@fault(proved("aten.split.Tensor"))
def split_across_the_pieces(patch: Patch) -> None:
    _turned(patch, "aten.split.Tensor", ("t", "h"))


def _turned(patch: Patch, op: str, group: tuple[str, ...]) -> None:
    def microbatch(_: Call, rule: Rule) -> Rule:
        def each(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                tuple(dim[::-1] if dim == group else dim for dim in dims) for dims in tensors
            )

        return replace(rule, inputs=each(rule.inputs), outputs=each(rule.outputs))

    changed(patch, op, microbatch)


@fault(proved("aten.view.default"))
def merged_dims_in_the_wrong_order(patch: Patch) -> None:
    _turned(patch, "aten.view.default", ("d0", "d1"))


@fault(proved("autopar.sdpa.default"))
def causal_rows_counted_from_the_piece(patch: Patch) -> None:
    no_longer_whole(patch, "autopar.sdpa.default", "s")


@fault(proved("autopar.sdpa.default"))
def keys_of_other_heads(patch: Patch) -> None:
    _turned(patch, "autopar.sdpa.default", ("kv", "g"))


@fault(proved("aten.cumsum.default"))
def running_sum_that_starts_anew(patch: Patch) -> None:
    no_longer_whole(patch, "aten.cumsum.default", *(f"d{k}" for k in range(4)))


@fault(proved("aten.flip.default"))
def each_piece_turned_round(patch: Patch) -> None:
    no_longer_whole(patch, "aten.flip.default", *(f"d{k}" for k in range(4)))


@fault(proved("aten.tril.default"))
def triangle_of_each_piece(patch: Patch) -> None:
    no_longer_whole(patch, "aten.tril.default", *(f"d{k}" for k in range(4)))


@fault(proved("aten.gather.default"), silent=False)
def positions_looked_up_in_a_piece(patch: Patch) -> None:
    no_longer_whole(patch, "aten.gather.default", *(f"d{k}" for k in range(4)))


@fault(retraced("states"))
def mask_drawn_by_every_rank(patch: Patch) -> None:
    """Pieces of dropout's mask, each drawn by itself: neither its rule nor that it depends on
    nothing keeps it whole."""
    ruled(patch, "aten.native_dropout.default", pointwise())
    patch.setattr(space, "_constants", lambda graph: frozenset())


@fault(retraced("layers"))
def sum_that_is_thought_complete(patch: Patch) -> None:
    """What lacks a sharded factor is the same on all ranks, it says: gradients of weights stay
    those of a rank's own rows."""
    original = strategy._placements

    def complete(node: Node, option: str) -> Any:
        inputs, outputs = original(node, option)
        partial = option.startswith("+")
        return inputs, outputs if partial else tuple(R if p == P else p for p in outputs)

    patch.setattr(strategy, "_placements", complete)


@fault(verified("vocabulary"))
def rows_reduced_over_one_axis_of_two(patch: Patch) -> None:
    original = work.exchange_axes

    def first(node: Node, choice: str) -> tuple[int, ...]:
        return original(node, choice)[:1]

    patch.setattr(work, "exchange_axes", first)
    patch.setattr(peers, "exchange_axes", first)


@fault(exchanged("aten._softmax.default", "2"), silent=False)
def list_of_prices_that_lacks_a_sum(patch: Patch) -> None:
    op = "aten._softmax.default"
    patch.setitem(OPS, op, replace(OPS[op], row_reductions=("max",)))
