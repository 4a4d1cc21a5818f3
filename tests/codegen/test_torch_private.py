"""What the code generator relies on in torch's private parts."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.codegen.torch_private import boxed_codegen, unwritten


def test_boxed_code_clears_its_list() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (x, y)), y))
    graph.set_codegen(boxed_codegen())
    given = [torch.ones(2), torch.zeros(2)]
    found = fx.GraphModule({}, graph)(given)
    assert given == []
    assert [t.tolist() for t in found] == [[1.0, 1.0], [0.0, 0.0]]


def test_functional_collectives_take_the_group_last() -> None:
    ops = torch.ops._c10d_functional
    expected = {
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "all_reduce": ["input", "reduce_op", "group_name"],
        "all_to_all_single": ["input", "output_split_sizes", "input_split_sizes", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "wait_tensor": ["tensor"],
    }
    for name, arguments in expected.items():
        schema = getattr(ops, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments


def test_code_is_written_when_it_is_asked_for() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
    root = fx.GraphModule({}, fx.Graph())
    with patch.object(fx.Graph, "python_code", side_effect=AssertionError("written")):
        gm = unwritten(root, graph)
    assert isinstance(gm, fx.GraphModule)
    assert "aten.neg" in gm.code
    assert gm(torch.ones(1))[0].item() == -1
