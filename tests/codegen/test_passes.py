"""What the passes over local graphs change, and what they leave."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.codegen.passes import BIAS, apply_passes, fuse_bias, tidy_views

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def called(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]


def test_dead_code_goes_and_inputs_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    graph.call_function(aten.neg.default, (x,))
    graph.output((x,))
    found = apply_passes(graph)
    assert called(found) == []
    assert len(found.find_nodes(op="placeholder")) == 2


def test_what_is_sent_and_awaited_stays_where_it_is() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    issued = graph.call_function(c10d.all_reduce.default, (x, "sum", "dp"))
    other = graph.call_function(aten.neg.default, (x,))
    come = graph.call_function(c10d.wait_tensor.default, (issued,))
    graph.output((graph.call_function(aten.mul.Tensor, (come, other)),))
    assert called(apply_passes(graph)) == ["all_reduce", "neg", "wait_tensor", "mul"]


@pytest.mark.parametrize("between", [False, True])
def test_a_bias_goes_back_into_its_matmul_if_nothing_is_awaited_between(between: bool) -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    product = graph.call_function(aten.mm.default, (a, b))
    if between:
        c = graph.call_function(c10d.wait_tensor.default, (c,))
    total = graph.call_function(aten.add.Tensor, (product, c))
    total.meta[BIAS] = True
    graph.output((total,))
    found = fuse_bias(graph)
    assert called(found) == (["mm", "wait_tensor", "add"] if between else ["addmm"])
    if not between:
        x, w, bias = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
        given = fx.GraphModule({}, found)(x, w, bias)[0]
        torch.testing.assert_close(given, x @ w + bias)


def test_views_that_undo_one_another_go() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.detach.default, (x,))
    y = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (y,)),))
    y = graph.call_function(aten.reshape.default, (y, [6]))
    y = graph.call_function(aten.reshape.default, (y, [3, 2]))
    graph.output((graph.call_function(aten.neg.default, (y,)),))
    assert called(tidy_views(graph)) == ["reshape", "neg"]
