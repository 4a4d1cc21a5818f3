"""Decoders of `transformers` that nobody wrote a rule for: those of the others are enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zoo.cases import ZooCase, make_case, moved
from tests.zoo.decoders import SHAPE, tokens
from tests.zoo.equality import check_any_plan, check_plan_chosen

SIZES = (2, 2)
OWN: dict[str, dict[str, Any]] = {
    "cohere": {},
    "falcon": {"ffn_hidden_size": 24, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mistral": {"sliding_window": 4},
    "olmo2": {},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "starcoder2": {"residual_dropout": 0.0, "attention_dropout": 0.0},
}
"""What each needs beside the sizes that all have."""


def case(name: str) -> ZooCase:
    torch.manual_seed(0)
    sizes = {key: size for key, size in SHAPE.items() if name != "falcon" or key != "head_dim"}
    config = AutoConfig.for_model(name, **{**sizes, **OWN[name]}, pad_token_id=0)
    return make_case(moved(AutoModelForCausalLM.from_config(config)), tokens())


DAILY = ("falcon", "mistral")
"""Those whose attention is of a kind of its own: few keys for a group, and in a window."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DAILY else pytest.mark.nightly) for n in OWN]
)
def test_as_eager_on_two_axes(name: str) -> None:
    found = case(name)
    assert all(node.has_rule for node in found.traced.graph.nodes)
    check_plan_chosen(found, SIZES)
    check_any_plan(found, SIZES, 0)
