"""The collectives of textbook plans, counted in the graphs that run."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.runtime.program.program import Program
from autopar.tracer import Traced, trace
from tests.layouts import program_of
from tests.planned import collectives, plan_for

LAYERS = 3


class Stack(nn.Module):
    """Linear layers without bias, and a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.sum()


class Pair(nn.Module):
    """An MLP pair between two other layers, as in a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32, bias=False)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        self.after = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(self.down(torch.nn.functional.gelu(self.up(x)))).sum()


@cache
def stack() -> Traced:
    return trace(Stack(), (torch.zeros(65536, 32),))


@cache
def pair() -> Traced:
    return trace(Pair(), (torch.zeros(16, 32),))


@cache
def llama() -> Traced:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.zeros(8, 16, dtype=torch.long)
    return trace(LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids})


def program(traced: Traced, mesh: str, pins: dict[str, str]) -> Program:
    return program_of(traced, plan_for(traced.graph, mesh, pins).structure.only)


def test_data_parallel_reduces_each_gradient_once() -> None:
    found = program(stack(), "4", {r"param:.*": "[R]|[R]", r"layers.*:forward:mm\.0": "m"})
    assert collectives(found.forward) == {("all_reduce", "dp"): 1}  # the loss
    assert collectives(found.backward) == {("all_reduce", "dp"): LAYERS}


@pytest.mark.parametrize("dim", [0, 1])
def test_zero_3_gathers_twice_and_scatters_once_per_parameter(dim: int) -> None:
    stored = f"[S({dim})]|[S({dim})]"
    found = program(stack(), "4", {r"param:.*": stored, r"layers.*:forward:mm\.0": "m"})
    assert collectives(found.forward) == {("all_gather", "dp"): LAYERS, ("all_reduce", "dp"): 1}
    # The input has no gradient, for which the first layer's weight would be gathered again.
    assert collectives(found.backward) == {
        ("all_gather", "dp"): LAYERS - 1,
        ("reduce_scatter", "dp"): LAYERS,
    }


def test_zero_2_keeps_what_it_gathered() -> None:
    found = program(stack(), "4", {r"param:.*": "[S(0)]|[R]", r"layers.*:forward:mm\.0": "m"})
    assert collectives(found.forward)["all_gather", "dp"] == LAYERS
    assert collectives(found.backward) == {("reduce_scatter", "dp"): LAYERS}


def test_a_column_and_a_row_layer_take_one_reduction_each_way() -> None:
    pins = {
        r"param:(before|after)\.weight": "[R]|[R]",
        r"param:up\.weight": "[S(0)]|[S(0)]",
        r"param:down\.weight": "[S(1)]|[S(1)]",
        r"(before|after):.*:mm\.\d": "-",
        r"up:forward:mm\.0": "n",
        r"down:forward:mm\.0": "k",
        r"up:backward:mm\.1": "k",
        r"down:backward:mm\.1": "n",
    }
    found = program(pair(), "4", pins)
    assert collectives(found.forward) == {("all_reduce", "dp"): 1}
    assert collectives(found.backward) == {("all_reduce", "dp"): 1}


MEGATRON = {
    r"param:model\.layers\.\*\.self_attn\.[qkv]_proj\.weight": "[S(0)]|[S(0)]",
    r"param:model\.layers\.\*\.self_attn\.o_proj\.weight": "[S(1)]|[S(1)]",
    r"param:model\.layers\.\*\.mlp\.(gate|up)_proj\.weight": "[S(0)]|[S(0)]",
    r"param:model\.layers\.\*\.mlp\.down_proj\.weight": "[S(1)]|[S(1)]",
    r"param:.*(norm|embed_tokens|lm_head)\.weight": "[R]|[R]",
    r"model\.layers\.\*\.self_attn:.*sdpa.*": "kv",
    r"model\.layers\.\*\.mlp:forward:mul\.0": "d2",
    r"model\.layers\.\*\.mlp:backward:mul\.\d": "d2",
}
"""Heads and the inner dim of the MLP over the axis."""


def test_megatron_with_sequence_parallel_norms() -> None:
    norms = {
        r"model\.layers\.\*\.(input|post_attention)_layernorm:.*:(pow|mul)\.\d": "d1",
        r"model\.layers\.\*:forward:add\.\d": "d1",
        r"model\.norm:.*:(pow|mul)\.\d": "d1",
    }
    scalar = {r"model\.layers\.\*\.\w*layernorm:backward:pow\.1": "d1",
              r"model\.norm:backward:pow\.1": "d1"}  # fmt: skip
    found = program(llama(), "4", MEGATRON | norms | scalar)
    layers = 2
    forward, backward = collectives(found.forward), collectives(found.backward)
    assert forward["all_gather", "dp"] >= 2 * layers
    assert forward["reduce_scatter", "dp"] == 2 * layers
    assert backward["reduce_scatter", "dp"] == 2 * layers
    assert backward["all_to_all", "dp"] == forward["all_to_all", "dp"] == 0


def test_megatron_without_sequence_parallelism() -> None:
    whole = {r"model\.layers\.\*\.\w*layernorm:.*:(pow|mul)\.\d": "-",
             r"model\.norm:.*:(pow|mul)\.\d": "-", r"lm_head:.*": "-",
             r"model\.layers\.\*:forward:add\.\d": "-"}  # fmt: skip
    # Gathering weights this small would be cheaper than reducing what rows of them make.
    rows = {r"model\.layers\.\*\.self_attn\.o_proj:forward:mm\.0": "k.0",
            r"model\.layers\.\*\.mlp\.down_proj:forward:mm\.0": "k"}  # fmt: skip
    found = program(llama(), "4", MEGATRON | whole | rows)
    assert collectives(found.forward) == Counter({("all_reduce", "dp"): 2 * 2})
    assert collectives(found.backward)["all_reduce", "dp"] == 2 * 2
