"""Language models, and layers of experts in them by hand."""

from __future__ import annotations

import pytest

from autopar.rules.experts import BACKWARD, FORWARD
from tests.zoo.cases import trained
from tests.zoo.equality import check_any_plan
from tests.zoo.every import EveryPlan


class TestDecoders(EveryPlan):
    names = ("opt", "gpt2", "llama", "mixtral")
    variants = ("qwen", "gemma")
    drawn = ("grouped",)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("sizes", "choice"),
    [
        ((2,), "e"),
        ((2,), "exchange"),
        ((4,), "exchange.1"),
        ((2, 2), "n.0,exchange"),
        ((2, 4), "n.0,exchange.1"),
        ((2, 2, 2), "n.0,exchange,i"),
    ],
)
def test_experts_by_hand(sizes: tuple[int, ...], choice: str) -> None:
    """Experts on one axis, beside tokens or parts of each expert on others: "exchange" sends the
    tokens of rows of the batch to them, "exchange.1" those of pieces of the sequence."""
    plan = check_any_plan(
        trained("mixtral"), sizes, 0, {r".*:(forward|backward):experts.*": choice}
    )
    layers = [
        node for node in trained("mixtral").traced.graph.nodes if node.op in (FORWARD, BACKWARD)
    ]
    assert [plan.structure.only.ops[node.key] for node in layers] == [choice] * 2
