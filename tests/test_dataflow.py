"""Groups of uses are kept with the graph they are said of, and with no other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.ir import uses
from autopar.ir.uses import groups
from autopar.tracer import trace


def test_groups_are_those_of_the_very_graph_and_go_with_it() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),)).graph
    renamed = replace(graph, nodes=tuple(replace(n, key=f"other {n.key}") for n in graph.nodes))
    assert groups(graph) is groups(graph)
    assert [f"other {g.key}" for g in groups(graph)] == [g.key for g in groups(renamed)]
    numbers = {id(graph), id(renamed)}
    assert numbers <= uses._known.keys()
    del graph, renamed
    assert not numbers & uses._known.keys()
