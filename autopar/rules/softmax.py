"""Softmax and its kin: ranks that share the dim reduce the largest and the sum of each row."""

from __future__ import annotations

from autopar.rules.op import Family, Op
from autopar.rules.reductions import along, reduction

_BOTH = ("max", "sum")

SOFTMAX: Family = (
    (Op(along(1, permuted=True), row_reductions=_BOTH), "_log_softmax _softmax"),
    (Op(reduction("permuted"), row_reductions=_BOTH), "logsumexp"),
    (
        Op(along(2, "0", permuted=True), row_reductions=("sum",)),
        "_log_softmax_backward_data _softmax_backward_data",
    ),
)
