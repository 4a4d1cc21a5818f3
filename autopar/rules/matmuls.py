"""Matmuls, whole and in groups of rows, one group per expert."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.ir.graph import Graph, Node
from autopar.rules.notation import (
    Call,
    Rule,
    aligned,
    letters,
    linear,
    linear_in,
    parse_rule,
    place,
    rule,
    singles,
)
from autopar.rules.op import Family, Op

_ENDS = (("x",),)


def _addmm(call: Call) -> Rule | None:
    """The summed dim is whole: each of its parts would add the bias once more."""
    names = ("b", "m", "n")[-len(call.out) :]
    added = aligned(call.shape(call.arg(0)), call.out, names)
    parsed = parse_rule("b m k!, b k! n -> b m n" if len(names) == 3 else "m k!, k! n -> m n")
    return replace(parsed, inputs=(added, *parsed.inputs))


def _trilinear(call: Call) -> Rule | None:
    """aten._trilinear(a, b, c, expand_a, expand_b, expand_c, sumdim). Each factor has all dims but
    those that it is expanded along, and the product is summed over `sumdim`. For `nn.Bilinear`:
    `n i, o i j, n j -> n o`."""
    factors = [call.arg(k) for k in range(3)]
    missing = [call.integers(3 + k, f"expand{k + 1}") or () for k in range(3)]
    names = letters(len(call.shape(factors[0])) + len(missing[0]))
    dims = [tuple(a for d, a in enumerate(names) if d not in gone) for gone in missing]
    sizes = {
        (name, size)
        for factor, own in zip(factors, dims, strict=True)
        for name, size in zip(own, call.shape(factor), strict=True)
    }
    if len(sizes) > len(names):
        return None
    summed = call.integers(6, "sumdim") or ()
    return rule(
        place(call, dict(enumerate(map(singles, dims)))),
        [singles(a for d, a in enumerate(names) if d not in summed)],
        partial=linear_in(call, "0 1 2"),
    )


def grouped_matmul(call: Call) -> Rule:
    """transformers.grouped_mm_fallback(rows, weights, ends) and aten._grouped_mm(a, b, ends): rows
    sorted by expert, times the weights of each. The ends of the groups count rows of the whole
    tensor, and do not fit a part of the rows. In the backward of the weights both factors have
    rows, and the result one matrix per expert."""
    left, right = (len(call.shape(call.arg(k))) for k in (0, 1))
    first, second, result = {
        (2, 3): ("tk", "ekn", "tn"),
        (3, 2): ("emk", "kt", "mt"),
        (2, 2): ("mt", "tn", "emn"),
        (3, 3): ("emk", "ekn", "emn"),
    }[left, right]
    return rule(
        place(call, {0: singles(first), 1: singles(second), 2: _ENDS}),
        [singles(result)],
        whole="" if (left, right) == (3, 3) else "tex",
        partial=linear_in(call, "0 1"),
    )


def grouped_matmul_backward(call: Call) -> Rule:
    """transformers.grouped_mm_fallback_backward(rows, weights, ends, grad)."""
    rows, weights = singles("tk"), singles("ekn")
    inputs = place(call, {0: rows, 1: weights, 2: _ENDS, 3: singles("tn")})
    return rule(inputs, [rows, weights], whole="tex", partial=linear(call, (call.arg(3),)))


def _flops(node: Node, graph: Graph) -> float:
    return 2.0 * prod(graph.atoms[f.atom].size for f in node.factors)


def _grouped_flops(node: Node, graph: Graph) -> float:
    """Every row (or column) meets the matrix of one group alone, unless both have groups."""
    left, right = (graph.type_of(ref).shape for ref in node.inputs[:2])
    return 2.0 * (prod(left[-2:] if len(right) == 2 else left) * right[-1])


MATMULS: Family = (
    (Op("m k, k n -> m n", _flops), "mm"),
    (Op("b m k, b k n -> b m n", _flops), "bmm"),
    (Op("m k, k -> m", _flops), "mv"),
    (Op("k, k -> _", _flops), "dot"),
    (Op(_addmm, _flops), "addmm baddbmm"),
    # One factor more in each term of the sum.
    (Op(_trilinear, lambda node, graph: 1.5 * _flops(node, graph)), "_trilinear"),
    (
        Op(grouped_matmul, _grouped_flops),
        "_grouped_mm transformers.grouped_mm_fallback.default",
    ),
    (
        Op(grouped_matmul_backward, lambda node, graph: 2 * _grouped_flops(node, graph)),
        "transformers.grouped_mm_fallback_backward.default",
    ),
)
