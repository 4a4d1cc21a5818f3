"""What losses in chunks hold and compute, counted beside what they are priced for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node
from autopar.ir.own_ops import LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD
from autopar.rules.work import busiest_work, flops, scratch_bytes
from autopar.runtime.ops import chunked_loss
from autopar.runtime.ops.operators import function_of
from tests.held import Held
from tests.rules.execution import snapshot
from tests.rules.test_exchange import one_op
from tests.rules.test_oracle import ruled

ROWS, WIDTH, CLASSES = 96, 24, 512

OPS = {
    LINEAR: chunked_loss.linear_nll,
    LINEAR_BACKWARD: chunked_loss.linear_nll_backward,
    SCORES: chunked_loss.scores_nll,
    SCORES_BACKWARD: chunked_loss.scores_nll_backward,
}


def computing(op: str) -> Callable[..., tuple[Tensor, ...]]:
    """The function of an op."""
    found = function_of(OPS[op].op)
    assert found is not None
    return found


def called(op: str, dtype: torch.dtype, chunks: int) -> tuple[object, ...]:
    x, w = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(CLASSES, WIDTH).to(dtype)
    target = torch.randint(0, CLASSES, (ROWS,))
    scores = (x @ w.t(),) if op in (SCORES, SCORES_BACKWARD) else ()
    read = scores if op == SCORES else (*scores, x, w)
    rows = (torch.randn(ROWS), torch.ones(())) if op in (LINEAR_BACKWARD, SCORES_BACKWARD) else ()
    return (*read, target, *rows, -100, chunks)


def graph_of(op: str, args: tuple[object, ...]) -> tuple[Graph, Node]:
    call, _ = snapshot(op, args, {})
    return one_op(call, ruled(call))


@pytest.mark.parametrize("chunks", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_what_is_held_on_the_way_is_counted(op: str, dtype: torch.dtype, chunks: int) -> None:
    args = called(op, dtype, chunks)
    graph, node = graph_of(op, args)
    counted = scratch_bytes(graph, node, Choice(()), ())
    with Held() as held:
        for x in args:
            _ = x[:] if isinstance(x, Tensor) and x.dim() else x  # seen from the start
        given, held.peak = held.peak, 0
        made = computing(op)(*args)  # below it, one op is all that there is to see
    outputs = sum(x.nbytes for x in made)
    of_rows = 40 * ROWS  # what there is one of per row
    assert -of_rows <= held.peak - given - (counted + outputs) <= of_rows


@pytest.mark.parametrize("op", OPS)
def test_floating_point_operations_are_torchs(op: str) -> None:
    args = called(op, torch.float32, 4)
    graph, node = graph_of(op, args)
    added = {torch.ops.aten.addmm_: lambda _, a, b, **how: 2 * math.prod(a) * b[1]}
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        computing(op)(*args)
    assert busiest_work(graph, node, Choice(()), ()).flops == counter.get_total_flops()
    if op != SCORES:
        assert flops(node, graph) == counter.get_total_flops()
