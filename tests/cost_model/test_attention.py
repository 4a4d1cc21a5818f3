"""Attention is priced for the rank that has most of it, and a ring for what it cannot hide."""

from __future__ import annotations

import pytest

from autopar.cost_model.moves import sent
from autopar.cost_model.price import price
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.rules.attention import BACKWARD, FORWARD, last_share
from tests.driver.test_long_sequences import HEAD_DIM, graph
from tests.planned import LIMIT, on_h100

LONG, SHORT = 1 << 17, 1 << 10


@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (24, 12), (24, 48), (24, 7)])
@pytest.mark.parametrize("ways", [1, 2, 3, 4])
def test_the_last_piece_of_the_rows_has_most_scores(queries: int, keys: int, ways: int) -> None:
    scores = [min(row + 1, keys) for row in range(queries)]
    length = queries // ways
    pieces = [sum(scores[k : k + length]) for k in range(0, queries, length)]
    assert last_share(queries, keys, ways) == max(pieces) / sum(pieces)


@pytest.mark.parametrize(
    ("causal", "share"), [(False, 1 / 8), (True, 15 / 64)], ids=["full", "causal"]
)
@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_pieces_cost_what_the_busiest_rank_computes(op: str, causal: bool, share: float) -> None:
    """15/64 for the last of 8 causal pieces; a share of 1/8 goes to heads, whatever the mask, and
    to pieces in zig-zag order."""
    costs = priced(graph(8, 8, causal, LONG), op)
    assert costs["s"] / costs["-"] == pytest.approx(share, rel=0.04)
    assert costs["ring"] / costs["-"] == pytest.approx(share, rel=0.06)
    assert costs["h"] / costs["-"] == pytest.approx(1 / 8, rel=0.04)
    if causal:
        assert costs["s_zigzag"] / costs["-"] == pytest.approx(1 / 8, rel=0.08)
        assert costs["ring_zigzag"] / costs["-"] == pytest.approx(1 / 8, rel=0.12)


def priced(traced: Graph, op: str) -> dict[str, float]:
    cluster, mesh = on_h100("8")
    problem = price(make_graph_request(traced, cluster, Options(memory_limit_bytes=LIMIT)).on(mesh))
    at = problem.keys.index(the(traced, op).key)
    return dict(zip(map(str, problem.labels[at]), map(float, problem.costs[at]), strict=True))


def the(traced: Graph, op: str) -> Node:
    (node,) = (node for node in traced.nodes if node.op == op)
    return node


def test_a_ring_costs_what_it_cannot_hide() -> None:
    """Behind long blocks all but the last transfer of gradients; behind nothing, all of them."""
    mesh = on_h100("8")[1]
    traced = graph(8, 8, False, LONG)
    forward, backward = (the(traced, op) for op in (FORWARD, BACKWARD))
    second = 10**9
    assert [ns for _, ns in sent(traced, forward, Choice(("ring",)), mesh, second)] == [0] * 7
    *hidden, home = (ns for _, ns in sent(traced, backward, Choice(("ring",)), mesh, second))
    assert hidden == [0] * 13
    assert home > 0
    shown = [ns for _, ns in sent(traced, backward, Choice(("ring",)), mesh, 0)]
    assert len(shown) == 14
    assert min(shown) == home


HALF = LONG // 8 // 2 * HEAD_DIM * 2
"""Bytes of one head of half a shard, in bfloat16."""
LSE = LONG // 8 // 2 * 8 * 4
"""Of the lse of 8 heads."""


@pytest.mark.parametrize(
    ("op", "choice", "shown"),
    [
        (FORWARD, "s_zigzag", [8 * HALF, 8 * HALF, LSE]),
        (BACKWARD, "s_zigzag", [24 * HALF, LSE, 8 * HALF]),
        (FORWARD, "ring_zigzag", [16 * HALF, 8 * HALF, LSE]),
        # The ring's last message has gradients of whole shards of keys and values.
        (BACKWARD, "ring_zigzag", [32 * HALF, LSE, 16 * HALF, 16 * HALF]),
    ],
)
def test_what_is_swapped_hides_behind_nothing(op: str, choice: str, shown: list[int]) -> None:
    """Halves of what has rows, of 8 heads for queries and 4 for keys: what is in bfloat16 in one
    message, and the lse in another."""
    traced = graph(8, 4, True, LONG)
    found = sent(traced, the(traced, op), Choice((choice,)), on_h100("8")[1], 10**9)
    assert [each.in_bytes for each, ns in found if ns] == shown
