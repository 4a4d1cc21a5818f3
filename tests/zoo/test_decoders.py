"""Language models compute what eager computes, on every mesh, whatever the plan."""

from __future__ import annotations

import pytest

from autopar import moe
from tests.zoo.cases import evaluated, trained
from tests.zoo.equality import MESHES, check_any_plan, check_plan_chosen

NAMES = ("opt", "gpt2", "llama", "mixtral")
VARIANTS = ("qwen", "gemma")
"""Near relatives of other models, with one random plan a mesh instead of five."""

PLANS = [(name, seed) for name in NAMES for seed in range(5)] + [
    (name, 0) for name in (*VARIANTS, "grouped")
]
CHOSEN = [(name, sizes) for name in NAMES for sizes in MESHES] + [(v, (2, 2)) for v in VARIANTS]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("name", "seed"), PLANS)
def test_any_plan(name: str, sizes: tuple[int, ...], seed: int) -> None:
    check_any_plan(trained(name), sizes, seed)


@pytest.mark.parametrize(("name", "sizes"), CHOSEN, ids=str)
def test_the_plan_chosen(name: str, sizes: tuple[int, ...]) -> None:
    check_plan_chosen(trained(name), sizes)


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
    layers = [node for node in trained("mixtral").traced.graph.nodes if node.op in moe.OPS]
    assert [plan.structure.ops[node.key] for node in layers] == [choice] * 2


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_plan_of_inference(name: str, sizes: tuple[int, ...]) -> None:
    check_any_plan(evaluated(name), sizes, 0)


@pytest.mark.parametrize("sizes", MESHES[:-1], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_chosen_for_inference(name: str, sizes: tuple[int, ...]) -> None:
    check_plan_chosen(evaluated(name), sizes)
