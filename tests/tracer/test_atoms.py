"""Dims as products of atoms, and classes of nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.ir.graph import Graph, Phase, Role
from autopar.tracer import trace
from autopar.tracer.atoms import Cells
from autopar.tracer.classes import pattern
from tests.tracer.models import gpt2, llama, token_inputs

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def refinable(a: list[int], b: list[int]) -> bool:
    cuts = sorted({prod(s[: i + 1]) for s in (a, b) for i in range(len(s))})
    return all(y % x == 0 for x, y in pairwise(cuts))


@given(SIZES, SIZES)
def test_two_factorizations_become_equal_or_stay_as_they_are(a: list[int], b: list[int]) -> None:
    cells = Cells()
    left, right = [cells.make(n) for n in a], [cells.make(n) for n in b]
    before = cells.leaves(left), cells.leaves(right)
    done = cells.equate(left, right)
    after = cells.leaves(left), cells.leaves(right)
    assert done == (prod(a) == prod(b) and refinable(a, b))
    if done:
        assert after[0] == after[1]
        assert prod(cells.sizes[c] for c in after[0]) == prod(a)
    else:
        assert after == before


@given(st.data())
def test_equalities_survive_later_splits(data: st.DataObject) -> None:
    cells = Cells()
    factors = data.draw(st.lists(st.sampled_from([2, 3]), min_size=2, max_size=5))
    total = prod(factors)
    chain = [cells.make(total) for _ in range(4)]
    for one, other in pairwise(chain):
        assert cells.equate([one], [other])
    assert cells.equate([chain[0]], [cells.make(n) for n in factors])
    leaves = [cells.leaves([c]) for c in chain]
    assert leaves == [leaves[0]] * 4
    assert [cells.sizes[c] for c in leaves[0]] == factors


def test_a_cell_times_itself_is_split_once() -> None:
    cells = Cells()
    cell = cells.make(4)
    assert cells.equate([cell, cell], [cells.make(2), cells.make(8)])
    assert [cells.sizes[c] for c in cells.leaves([cell])] == [2, 2]


@cache
def graph_of(build: Callable[..., nn.Module], num_layers: int = 2) -> Graph:
    return trace(build(num_layers=num_layers), (), token_inputs()).graph


def described(graph: Graph, keep: Callable[[str], bool]) -> str:
    """Key and types of the nodes whose key is kept."""
    lines = (re.split(" -> |  # ", line) for line in str(graph).splitlines())
    return "\n".join(f"{key} {types}" for _, types, key in lines if keep(key))


LLAMA_PARAMETERS = """\
param:model.embed_tokens.weight float32[vocab hidden]
param:model.layers.*.self_attn.q_proj.weight float32[kv*g*hd0*hd1 hidden]
param:model.layers.*.self_attn.k_proj.weight float32[kv*hd0*hd1 hidden]
param:model.layers.*.self_attn.v_proj.weight float32[kv*head_dim hidden]
param:model.layers.*.self_attn.o_proj.weight float32[hidden kv*g*head_dim]
param:model.layers.*.mlp.gate_proj.weight float32[a0 hidden]
param:model.layers.*.mlp.up_proj.weight float32[a0 hidden]
param:model.layers.*.mlp.down_proj.weight float32[hidden a0]
param:model.layers.*.input_layernorm.weight float32[hidden]
param:model.layers.*.post_attention_layernorm.weight float32[hidden]
param:model.norm.weight float32[hidden]
param:lm_head.weight float32[classes hidden]"""

LLAMA_MATMULS = """\
model.layers.*.self_attn.q_proj:forward:mm.0 float32[batch*seq kv*g*hd0*hd1]
model.layers.*.self_attn.k_proj:forward:mm.0 float32[batch*seq kv*hd0*hd1]
model.layers.*.self_attn.v_proj:forward:mm.0 float32[batch*seq kv*head_dim]
model.layers.*.self_attn:forward:sdpa.0 float32[batch kv*g seq head_dim], float32[batch kv*g seq]
model.layers.*.self_attn.o_proj:forward:mm.0 float32[batch*seq hidden]
model.layers.*.mlp.gate_proj:forward:mm.0 float32[batch*seq a0]
model.layers.*.mlp.up_proj:forward:mm.0 float32[batch*seq a0]
model.layers.*.mlp.down_proj:forward:mm.0 float32[batch*seq hidden]
lm_head:forward:mm.0 float32[batch*seq classes]"""


def test_atoms_of_llama() -> None:
    graph = graph_of(llama, 1)
    assert described(graph, lambda key: key.startswith("param:")) == LLAMA_PARAMETERS
    matmuls = described(graph, lambda key: ":forward:mm." in key or ":forward:sdpa." in key)
    assert matmuls == LLAMA_MATMULS


def test_a_llama_of_any_depth_has_the_same_atoms() -> None:
    graphs = [graph_of(llama, n) for n in (1, 2)]
    assert len({graph.atoms for graph in graphs}) == 1


def test_fused_qkv_is_three_times_heads() -> None:
    graph = graph_of(gpt2)
    weight = next(n for n in graph.nodes if n.target.endswith("h.0.attn.c_attn.weight"))
    assert [[graph.atoms[a].size for a in dim] for dim in weight.outputs[0].parts] == [
        [32],
        [3, 4, 8],
    ]


@pytest.mark.parametrize("build", [gpt2, llama])
def test_gradients_have_the_parts_of_their_parameters(build: Callable[[], nn.Module]) -> None:
    graph = graph_of(build)
    types = {n.target: n.outputs[0] for n in graph.with_role(Role.PARAM)}
    for node in graph.with_role(Role.GRAD):
        assert graph.type_of(node.inputs[0]) == types[node.target]


@pytest.mark.parametrize("build", [gpt2, llama])
def test_views_have_a_factor_for_every_slot(build: Callable[[], nn.Module]) -> None:
    graph = graph_of(build)
    views = [n for n in graph.nodes if n.view]
    assert len(views) > 50
    for node in views:
        for output, tensor in enumerate(node.outputs):
            covered = {f.outputs[output] for f in node.factors}
            assert {slot for slot, _ in tensor.slots()} <= covered


@pytest.mark.parametrize("build", [gpt2, llama])
def test_names_of_factors_are_unique(build: Callable[[], nn.Module]) -> None:
    for node in graph_of(build).nodes:
        names = [f.name for f in node.factors]
        assert len(names) == len(set(names))


class Regroups(nn.Module):
    """6 x 4 -> 4 x 6 has no common refinement."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x).reshape(-1, 4, 6) * 2.0


def test_dims_that_do_not_fit_are_whole() -> None:
    graph = trace(Regroups(), (torch.zeros(5, 6, 4),)).graph
    node = next(n for n in graph.nodes if "view" in n.op)
    assert {f.name for f in node.factors if not f.whole} == {"d0"}
    assert [[graph.atoms[a].size for a in dim] for dim in node.outputs[0].parts] == [[5], [4], [6]]


class Squares(nn.Module):
    """Adds a matrix whose dims a view has split to one with other splits."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1, 6, 2).sin().reshape(-1, 12) + y.reshape(-1, 4, 3).sin().reshape(-1, 12)


def test_splits_that_do_not_fit_are_whole_where_they_meet() -> None:
    graph = trace(Squares(), (torch.zeros(5, 12), torch.zeros(5, 12))).graph
    add = next(n for n in graph.nodes if n.op == "aten.add.Tensor")
    atoms = graph.atoms
    for tensor in (*graph.input_types(add), *add.outputs):
        assert prod(atoms[a].size for a in tensor.parts[1]) == 12
    free = [f for f in add.factors if not f.whole]
    assert [f.inputs for f in free] == [((0, 0), (0, 0))]
    covered = {(k, f.inputs[k]) for f in add.factors for k in (0, 1)}
    for k, tensor in enumerate(graph.input_types(add)):
        assert {(k, slot) for slot, _ in tensor.slots()} <= covered


def test_layers_share_keys() -> None:
    graphs = {n: graph_of(llama, n) for n in (2, 3)}
    keys = {n: {node.key for node in graph.nodes} for n, graph in graphs.items()}
    assert keys[2] == keys[3]
    assert not any("~" in key for key in keys[3])
    assert "model.layers.*.mlp.down_proj:forward:mm.0" in keys[3]
    assert "model.layers.*.mlp.down_proj:backward:mm.1" in keys[3]
    assert {"input:0", "tangent:0", "loss:0", "detached:1", "grad:lm_head.weight"} <= keys[3]


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=i != 1) for i in range(3))
        self.wide = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) * (1.0 if i else 1)
        return self.wide[1](self.wide[0](x))


def test_unequal_nodes_have_unequal_keys() -> None:
    graph = trace(Unequal(), (torch.zeros(3, 4),)).graph
    ops = ("aten.mm.default", "aten.mul.Tensor")
    keys = [n.key for n in graph.nodes if n.op in ops and n.phase is Phase.FORWARD]
    assert keys == [
        "layers.*:forward:mm.0",
        ":forward:mul.0",
        "layers.*:forward:mm.0",
        ":forward:mul.1",
        "layers.*:forward:mm.0",
        ":forward:mul.2",
        "wide.*:forward:mm.0",
        "wide.*:forward:mm.0~1",
    ]
    assert "param:wide.*.weight~1" in {n.key for n in graph.nodes}


def test_pattern() -> None:
    assert pattern("h.10.attn.2") == "h.*.attn.*"
    assert pattern("") == ""
