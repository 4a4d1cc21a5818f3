"""Groups of uses are kept with the graph they are said of, and with no other."""

from __future__ import annotations

import gc
from dataclasses import replace
from weakref import ReferenceType

import torch
from torch import nn

from autopar.ir.graph import per_graph
from autopar.ir.uses import groups
from autopar.tracer import trace


class Answer:
    """What is worked out of a graph."""


def test_groups_are_those_of_the_very_graph_and_go_with_it() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),)).graph
    renamed = replace(graph, nodes=tuple(replace(n, key=f"other {n.key}") for n in graph.nodes))
    assert groups(graph) is groups(graph)
    assert [f"other {g.key}" for g in groups(graph)] == [g.key for g in groups(renamed)]
    find = per_graph(lambda _: Answer())
    kept = ReferenceType(find(graph))
    assert find(graph) is kept() is not find(renamed)
    del graph
    gc.collect()
    assert kept() is None
