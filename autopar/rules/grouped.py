"""Rules of matrix products in groups of rows, one group per expert."""

from __future__ import annotations

from autopar.rules.call import Call, linear, place, rule, singles
from autopar.rules.notation import Rule

_ENDS = (("x",),)


def grouped_matmul(call: Call) -> Rule:
    """transformers.grouped_mm_fallback(rows, weights, ends) and aten._grouped_mm(a, b, ends): rows
    sorted by expert, times the weights of each. The ends of the groups are counts of rows of the
    whole, which a part of the rows would not fit. In the backward of the weights both factors have
    rows, and the product one matrix per expert."""
    left, right = (len(call.shape(call.arg(k))) for k in (0, 1))
    first, second, result = {
        (2, 3): ("tk", "ekn", "tn"),
        (3, 2): ("emk", "kt", "mt"),
        (2, 2): ("mt", "tn", "emn"),
        (3, 3): ("emk", "ekn", "emn"),
    }[left, right]
    pairs = ((call.arg(0), singles(first)), (call.arg(1), singles(second)))
    sets = ((call.arg(0),), (call.arg(1),))
    whole = "" if (left, right) == (3, 3) else "tex"
    return rule(
        place(call, *pairs, (call.arg(2), _ENDS)),
        [singles(result)],
        whole=whole,
        partial=linear(call, *sets),
    )


def grouped_matmul_backward(call: Call) -> Rule:
    """transformers.grouped_mm_fallback_backward(rows, weights, ends, grad)."""
    rows, weights = singles("tk"), singles("ekn")
    dims = (rows, weights, _ENDS, singles("tn"))
    inputs = place(call, *zip((call.arg(k) for k in range(4)), dims, strict=True))
    return rule(inputs, [rows, weights], whole="tex", partial=linear(call, (call.arg(3),)))
