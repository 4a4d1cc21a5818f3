"""What ops read of their inputs, by changing one element after the other: the price of an op that
picks counts what it picks, and no op reads more than its price says."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.rules.op import Shapes
from autopar.rules.table import OPS
from tests.rules.execution import call_op, resolve, snapshot
from tests.rules.samples import SAMPLES
from tests.rules.test_oracle import made

PICKING = {
    "aten.embedding.default", "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default", "aten.gather.default", "aten.index.Tensor",
    "aten._unsafe_index.Tensor", "aten.index_select.default", "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default", "aten.slice.Tensor", "aten.narrow.default",
    "aten.select.int", "aten.unbind.int",
}  # fmt: skip
"""Ops whose output is picked from their first input."""
CASES = [
    (op, index)
    for op in sorted(op for op, record in OPS.items() if record.reads)
    for index in range(len(SAMPLES[op]))
]
UNSEEN = ("aten.empty_like", "aten.new_empty")
"""Ops whose output is what is in memory: nothing that can be compared."""


def touched(op: str, args: Any, kwargs: Any, source: Tensor) -> int:
    """How many elements of `source` the result of an op depends on."""
    target, flat = resolve(op), source.view(-1)

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        return [x.clone() for x in call_op(target, args, kwargs)]

    before, count = results(), 0
    for k in range(flat.numel()):
        old = flat[k].clone()
        flat[k] = (old == 0) if source.dtype == torch.bool else old + 3
        pairs = zip(before, results(), strict=True)
        count += not all(torch.equal(a, b) for a, b in pairs)
        flat[k] = old
    return count


@pytest.mark.parametrize(("op", "index"), CASES)
def test_an_op_is_priced_for_what_it_reads(op: str, index: int) -> None:
    args, kwargs = made(op, index)
    call, tensors = snapshot(op, args, kwargs)
    outputs = tuple(t.shape for t in call.outputs)
    shapes = Shapes(call.shapes, outputs, call.shapes, outputs)
    reads = OPS[op].reads
    assert reads is not None
    for position, elements in reads(shapes).items():
        source = tensors[position]
        is_seen = not op.startswith(UNSEEN)
        read = touched(op, args, kwargs, source) if is_seen else 0
        assert read <= min(elements, source.numel())
        if op in PICKING:
            indices = chain(call.inputs[:position], call.inputs[position + 1 :])
            assert elements <= sum(prod(i.shape) for i in indices) + sum(map(prod, outputs))
        else:
            assert elements == read == 0
