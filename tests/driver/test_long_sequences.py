"""Which form of attention the solver chooses on H100s, as sequences grow."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model.price import price
from autopar.ir.graph import Graph
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.rules.attention import BACKWARD, FORWARD
from autopar.solver import solve
from autopar.tracer import trace
from tests.planned import LIMIT, on_h100

HEAD_DIM = 128


class Attention(nn.Module):
    """A layer's projections and attention, in bfloat16."""

    def __init__(self, heads: int, groups: int, is_causal: bool) -> None:
        super().__init__()
        width = heads * HEAD_DIM
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * HEAD_DIM, bias=False)
        self.v = nn.Linear(width, groups * HEAD_DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal, enable_gqa=True
        )
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        return x.float().square().mean()


@cache
def graph(heads: int, groups: int, is_causal: bool, length: int) -> Graph:
    with torch.device("meta"):
        model = Attention(heads, groups, is_causal).bfloat16()
        x = torch.zeros(1, length, heads * HEAD_DIM, dtype=torch.bfloat16)
    return trace(model, (x,)).graph


def chosen(traced: Graph, on: str, limit: int = LIMIT) -> tuple[str, str]:
    """The solver's choices for attention, forward and backward."""
    cluster, mesh = on_h100(on)
    problem = price(make_graph_request(traced, cluster, Options(memory_limit_bytes=limit)).on(mesh))
    solution = solve(problem)
    assert solution.choice, solution.status
    found = dict(zip(problem.keys, zip(problem.labels, solution.choice, strict=True), strict=True))
    ops = {n.op: found[n.key] for n in traced.nodes if n.op in (FORWARD, BACKWARD)}
    forward, backward = (ops[op] for op in (FORWARD, BACKWARD))
    return str(forward[0][forward[1]]), str(backward[0][backward[1]])


CHOSEN = {
    "too short to be cut": (12, 12, False, 1 << 10, "8", "-"),
    "heads that do not divide": (12, 12, False, 1 << 17, "8", "ring"),
    "under a causal mask": (12, 12, True, 1 << 17, "8", "ring_zigzag"),
    "too short to be balanced": (12, 12, True, 1 << 12, "8", "s"),
    "few keys and values": (12, 4, True, 1 << 17, "8", "s_zigzag"),
    "heads on one axis": (12, 12, True, 1 << 17, "2x8", "h,ring_zigzag"),
    "heads that divide share causal work evenly": (8, 8, True, 1 << 17, "8", "h"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(name: str) -> None:
    heads, groups, is_causal, length, on, choice = CHOSEN[name]
    assert chosen(graph(heads, groups, is_causal, length), on) == (choice, choice)


def test_gathered_keys_that_do_not_fit_go_round() -> None:
    """Two million positions: backward would hold all keys and values and all their gradients."""
    traced = graph(12, 4, True, 1 << 21)
    assert chosen(traced, "8") == ("s_zigzag", "s_zigzag")
    assert chosen(traced, "8", 5 << 30) == ("s_zigzag", "ring_zigzag")
