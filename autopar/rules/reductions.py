"""Ops along dims: sums, means, extremes, sorting."""

from __future__ import annotations

from autopar.ir.graph import Ref
from autopar.rules.notation import (
    Call,
    Dim,
    Dims,
    Rule,
    RuleFunction,
    dim_of,
    letters,
    linear,
    linear_in,
    rule,
    singles,
)
from autopar.rules.op import Family, Op


def reduction(how: str, at: int | None = 1) -> RuleFunction:
    """The dims of argument `at` (all if None) are reduced: by "sum", by "count" (a sum that is not
    linear), by "mean", "whole", or "permuted" (the op itself reduces over ranks)."""

    def function(call: Call) -> Rule:
        rank = len(call.shapes[0])
        named = None if at is None else call.integers(at, "dim")
        gone = {dim_of(d, rank) for d in named} if named else set(range(rank))
        names = singles(letters(rank))
        keep = len(call.out) == rank
        result: list[Dim] = [
            () if d in gone else name for d, name in enumerate(names) if keep or d not in gone
        ]
        return rule(
            [names],
            [result] * len(call.outputs),
            whole=[names[d][0] for d in gone if rank] if how == "whole" else (),
            permuted=[names[d][0] for d in gone if rank] if how == "permuted" else (),
            partial=linear(call, (Ref(0),)) if how in ("sum", "mean") else (),
            mean=how == "mean",
        )

    return function


def histogram(call: Call) -> Rule:
    """aten.histc(x, bins, min, max): counts add up, where the bins do not depend on the data."""
    fixed = call.arg(2, "min", 0) != call.arg(3, "max", 0)
    names = letters(len(call.shapes[0]))
    return rule([singles(names)], [(("bin",),)], whole=("bin", *(() if fixed else names)))


def along(at: int, joint: str = "", default: int = -1, *, permuted: bool = False) -> RuleFunction:
    """The dim of argument `at` is whole or `permuted`, the others parallel; all tensors have equal
    ranks. An output of another extent in that dim has a letter of its own."""

    def function(call: Call) -> Rule:
        shape = call.shapes[0]
        dim = dim_of(call.integer(at, "dim", default), len(shape))
        names = letters(len(shape))
        whole = set(names[dim : dim + 1])
        outputs: list[Dims] = []
        for index, output in enumerate(call.outputs):
            there = list(names)
            if output.shape != shape:
                there[dim] = f"o{index}"
                whole.add(there[dim])
            outputs.append(singles(there))
        return rule(
            [singles(names)] * len(call.inputs),
            outputs,
            whole=() if permuted else whole,
            permuted=whole if permuted else (),
            partial=linear_in(call, joint),
        )

    return function


REDUCTIONS: Family = (
    (Op(reduction("sum")), "sum.dim_IntList"),
    (Op(reduction("sum", None)), "sum"),
    (Op(reduction("mean")), "mean.dim"),
    (Op(reduction("mean", None)), "mean"),
    (Op(reduction("count")), "count_nonzero.dim_IntList"),
    (Op(histogram), "histc"),
    (
        Op(reduction("whole")),
        """all.dim all.dims amax amin any.dim any.dims argmax argmin max.dim min.dim
        prod.dim_int std.correction var.correction var_mean.correction""",
    ),
    (Op(reduction("whole", None)), "all any max min prod"),
    (Op(reduction("whole", 2)), "linalg_vector_norm"),
    (Op(along(1), sequential=True), "_safe_softmax"),
    (Op(along(1)), "argsort cummax cummin cumprod logcumsumexp sort"),
    (Op(along(2)), "sort.stable topk"),
    (Op(along(1, "0")), "cumsum"),
)
