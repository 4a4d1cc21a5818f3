"""What the passes over local graphs change, and what they leave."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.passes import MAX_IN_FLIGHT, apply_passes

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def called(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "call_function"]


def reduced(graph: fx.Graph, x: fx.Node, name: str) -> fx.Node:
    issued = graph.create_node("call_function", c10d.all_reduce.default, (x, "sum", "dp"), {}, name)
    return graph.create_node(
        "call_function", c10d.wait_tensor.default, (issued,), {}, f"{name}_wait"
    )


def test_wait_and_layout_sink_to_the_first_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.reshape.default, (reduced(graph, x, "r"), [2, 2]))
    other = graph.call_function(aten.neg.default, (x,))
    graph.output((graph.call_function(aten.mul.Tensor, (total, other)),))
    gm = fx.GraphModule({}, apply_passes(graph))
    assert called(gm) == ["r", "neg_default", "r_wait", "reshape_default", "mul_tensor"]


def test_few_results_that_only_leave_the_graph_are_under_way() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    count = MAX_IN_FLIGHT + 2
    graph.output(tuple(reduced(graph, x, f"r{k}") for k in range(count)))
    order = called(fx.GraphModule({}, apply_passes(graph)))
    for k in range(count):
        under_way = [
            i
            for i in range(count)
            if order.index(f"r{i}") <= order.index(f"r{k}") < order.index(f"r{i}_wait")
        ]
        assert len(under_way) <= MAX_IN_FLIGHT
    assert order.index("r0_wait") > order.index("r1")


def test_dead_code_goes_and_inputs_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    graph.call_function(aten.neg.default, (x,))
    graph.output((x,))
    gm = fx.GraphModule({}, apply_passes(graph))
    assert called(gm) == []
    assert len(gm.graph.find_nodes(op="placeholder")) == 2
