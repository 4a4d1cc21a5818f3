"""A lean graph is what torch's own would be."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.runtime.program.lean import LeanGraph, give


def _written(graph: fx.Graph) -> fx.Graph:
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0]), {"keepdim": True})
    twice = graph.call_function(operator.add, (total, total))
    graph.output((graph.call_function(operator.add, (twice, 1.5)), [x]))
    return graph


def test_nodes_names_and_users_are_those_of_torch() -> None:
    lean, plain = _written(LeanGraph()), _written(fx.Graph())
    assert str(lean) == str(plain)
    for a, b in zip(lean.nodes, plain.nodes, strict=True):
        assert (a.name, str(a.args), str(a.kwargs)) == (b.name, str(b.args), str(b.kwargs))
        assert list(map(str, a.users)) == list(map(str, b.users))
    found = lean.find_nodes(op="call_function", target=operator.add)
    assert [node.name for node in found] == ["add", "add_1"]
    lean.lint()


def test_arguments_given_anew_replace_the_old() -> None:
    graph = _written(LeanGraph())
    x, total, twice = list(graph.nodes)[:3]
    give(twice, (x, total), {})
    assert list(x.users) == [total, graph.output_node(), twice]
    assert list(total.users) == [twice]
