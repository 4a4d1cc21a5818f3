"""Softmax and its kin: ranks that share the dim reduce the largest and the sum of each row."""

from __future__ import annotations

from autopar.rules.op import Family, Op
from autopar.rules.reductions import along, reduction

_BOTH = ("max", "sum")
_ALONG, _BACK = along(1, permuted=True), along(2, "0", permuted=True)

SOFTMAX: Family = (
    (Op(_ALONG, row_reductions=_BOTH, row_copies=(0.0, 1.5)), "_log_softmax"),
    (
        Op(_ALONG, row_reductions=_BOTH, row_copies=(1.0, 1.5), sequential=True),
        "_softmax",
    ),
    (
        Op(reduction("permuted"), row_reductions=_BOTH, row_copies=(0.0, 1.0)),
        "logsumexp",
    ),
    (
        Op(_BACK, row_reductions=("sum",), row_copies=(1.0, 2.5)),
        "_log_softmax_backward_data",
    ),
    (
        Op(_BACK, row_reductions=("sum",), row_copies=(2.0, 2.5)),
        "_softmax_backward_data",
    ),
)
