"""Layers of experts under every way to shard them: the gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import autopar
from autopar.ir.choices import Choice, choices
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.rules.work import exchanges
from autopar.runtime.ops import ragged_all_to_all
from autopar.runtime.simulator import spmd
from tests.codegen.models import Case, make_case
from tests.layouts import program_of
from tests.planned import on_h100, plan_for

VOCAB = 32
OWN = {"rtol": 1e-9, "atol": 1e-12}
FLOAT32_INSIDE = {"rtol": 1e-5, "atol": 1e-7}
"""Models of transformers take their routers' softmax, and the loss, in float32."""


class Own(nn.Module):
    """A layer of experts of one's own, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 12, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 6))
        self.up_bias = nn.Parameter(torch.randn(4, 12))
        self.down_bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = autopar.experts(
            x, chosen, weights, self.up, self.down, "gelu",
            up_bias=self.up_bias, down_bias=self.down_bias,
        )  # fmt: skip
        return (x + y).square().mean()


def own() -> tuple[nn.Module, dict[str, Any]]:
    return Own().double(), {"x": torch.randn(16, 8, dtype=torch.float64)}


SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 16, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def qwen2_moe() -> tuple[nn.Module, dict[str, Any]]:
    """With an expert that every token goes to."""
    config = Qwen2MoeConfig(
        **SMALL, intermediate_size=24, moe_intermediate_size=12, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=8,
    )  # fmt: skip
    return _in_float64(Qwen2MoeForCausalLM(config))


def gpt_oss() -> tuple[nn.Module, dict[str, Any]]:
    """Weights transposed, columns of gate and rest in turn, biases, a gate of its own."""
    config = GptOssConfig(
        **SMALL, intermediate_size=12, num_local_experts=4, head_dim=4, num_experts_per_tok=2,
        layer_types=["full_attention"],
    )  # fmt: skip
    return _in_float64(GptOssForCausalLM(config))


def _in_float64(model: Any) -> tuple[nn.Module, dict[str, Any]]:
    model.set_experts_implementation("eager")
    ids = torch.randint(VOCAB, (4, 8))
    return model.double(), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "own": own, "qwen2_moe": qwen2_moe, "gpt_oss": gpt_oss,
}  # fmt: skip


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    model, kwargs = MODELS[name]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return make_case(model, kwargs)


def check(name: str, mesh: str, choice: str | None) -> set[str]:
    """Compares with eager the step of the best plan whose experts compute by `choice`; the choices
    of experts in it."""
    found = case(name)
    graph = found.traced.graph
    pins = {} if choice is None else {r".*:(forward|backward):experts.*": choice}
    plan = plan_for(graph, mesh, pins)
    program = program_of(found.traced, plan.structure.only, graph)
    # What comes besides the loss (a router's own loss) is in it already.
    tangents = {at: torch.zeros_like(value) for at, value in found.outputs.items()}
    step = spmd.train_step(
        program,
        on_h100(mesh)[1],
        graph,
        plan.structure.only,
        found.tensors,
        tangents,
        tolerance=1e-12,
    )
    close = OWN if name == "own" else FLOAT32_INSIDE
    torch.testing.assert_close(step.outputs["loss:0"], found.loss, **close)
    assert step.gradients.keys() == found.gradients.keys()
    for param, expected in found.gradients.items():
        torch.testing.assert_close(
            step.gradients[param], expected, **close, msg=lambda m, p=param: f"{p}: {m}"
        )
    return {plan.structure.only.ops[n.key] for n in graph.nodes if n.op in (FORWARD, BACKWARD)}


OWN_CHOICES = ["n", "e", "i", "exchange"]
OWN_CHOICES_2D = ["n,exchange", "exchange,n", "i,exchange", "exchange,i", "e,n", "e,e", "e,i"]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("mesh", "choice"),
    [*(("2", c) for c in OWN_CHOICES), ("4", "exchange"), *(("2x2", c) for c in OWN_CHOICES_2D)],
)
def test_a_layer_of_ones_own(mesh: str, choice: str) -> None:
    assert check("own", mesh, choice) == {choice}


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("name", "mesh", "choice"),
    [
        ("qwen2_moe", "2", "exchange"),
        ("gpt_oss", "2", "i"),
        ("gpt_oss", "2", "exchange"),
    ],
)
def test_models_of_transformers(name: str, mesh: str, choice: str) -> None:
    assert check(name, mesh, choice) == {choice}


def test_under_the_plan_chosen() -> None:
    check("qwen2_moe", "4", None)


def test_a_step_sends_the_messages_that_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first rank on each line of an axis: its rows, whatever the router makes of them."""
    heard: list[tuple[int, int]] = []
    exchanged = ragged_all_to_all.exchanged

    def listen(messages: Sequence[ragged_all_to_all.RaggedMessage]) -> list[Tensor]:
        heard.append((len(messages), sum(message.rows.nbytes for message in messages)))
        return exchanged(messages)

    monkeypatch.setattr(ragged_all_to_all, "exchanged", listen)
    check("own", "2x2", "n,exchange")
    graph = case("own").traced.graph
    priced = [
        (2, 2 * each.in_bytes)
        for node in graph.nodes
        if node.op in (FORWARD, BACKWARD)
        for each in exchanges(graph, node, Choice(("n", "exchange")), (2, 2))
        for _ in range(2)
    ]
    assert sorted(heard) == sorted(priced)


def test_a_joint_factor_takes_its_members_along() -> None:
    """Of tokens and experts exchanged on one axis, only the tokens may be cut on another."""
    graph = case("own").traced.graph
    node = next(n for n in graph.nodes if n.op == FORWARD)

    def found(sizes: tuple[int, ...]) -> set[str]:
        return {str(c) for c in choices(node, graph.atoms, sizes) if "exchange" in c.options}

    joint = found((2, 2))
    assert joint == {
        "-,exchange", "exchange,-", "n,exchange", "exchange,n", "i,exchange", "exchange,i",
    }  # fmt: skip
    # 16 tokens do not divide by 4 * 8; 4 experts do not by 8.
    assert "n,exchange" not in found((8, 4))
    assert "-,exchange" not in found((2, 8))
