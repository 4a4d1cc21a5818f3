"""The plans themselves: the text of a few, and what an expert would look for in them.

The texts beside this file are compared exactly. A change of prices or of the solver may change
them on purpose: `AUTOPAR_REWRITE_GOLDEN=1 pytest tests/golden` writes them anew, and the review of
the change reads what is different. What an expert would look for is asserted of the plans as well,
so that no rewriting loses it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.mesh import BUCKET_BYTES
from autopar.ir.sharding import P, R, S, Sharding
from autopar.ir.uses import groups
from autopar.plans.layout import Layout
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.report.outline import outline
from autopar.tracer import trace
from tests.layouts import laid_out

HERE = Path(__file__).parent
REWRITE = "AUTOPAR_REWRITE_GOLDEN"


def llama(batch: int, sequence: int, dtype: torch.dtype, **widths: int) -> Graph:
    """Two layers, traced without storage. Layers are equal: more of them change the decisions only
    where memory binds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False, **widths))
            ids = torch.zeros(batch, sequence, dtype=torch.long)
    finally:
        torch.set_default_dtype(before)
    return trace(model, (), {"input_ids": ids, "labels": ids}).graph


@cache
def llama_70b(vocabulary: int, batch: int) -> Graph:
    return llama(
        batch, 8192, torch.bfloat16, hidden_size=8192, intermediate_size=28672,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=vocabulary,
    )  # fmt: skip


@cache
def tiny_llama() -> Graph:
    return llama(
        64, 256, torch.float32, hidden_size=64, intermediate_size=192, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=256,
    )  # fmt: skip


def found(graph: Graph, cluster: str, mesh: str, gap_ppm: int = 0) -> Plan:
    """A plan on `mesh` that is proven to be the best, or as good but for a gap; nothing is
    pinned."""
    plan = answer(
        make_graph_request(graph, parse_cluster(cluster), Options(mesh=mesh)), lambda _: None
    )
    assert plan.provenance.gap_ppm <= gap_ppm
    assert gap_ppm or plan.provenance.status == "optimal"
    return plan


def check_text(name: str, graph: Graph, plan: Plan) -> None:
    path, text = HERE / f"{name}.txt", outline(graph, plan)
    if os.environ.get(REWRITE):
        path.write_text(text)
    assert text == path.read_text(), f"{REWRITE}=1 writes {path.name} anew"


def last_ops(graph: Graph, module: str, op: str) -> set[int]:
    """The last forward op `op` of each module whose name ends so."""
    found: dict[str, int] = {}
    for node in graph.with_role(Role.OP):
        is_meant = node.phase is Phase.FORWARD and node.module.endswith(module)
        if is_meant and node.op.startswith(f"aten.{op}."):
            found[node.module] = node.index
    assert found
    return set(found.values())


def made(layout: Layout, module: str, op: str) -> set[Sharding]:
    """How those ops leave their output."""
    nodes = (layout.graph.nodes[index] for index in last_ops(layout.graph, module, op))
    return {layout.pair(node)[1][0] for node in nodes}


def used(layout: Layout, module: str, op: str) -> set[Sharding]:
    """In what states their outputs are used in the forward phase."""
    meant = last_ops(layout.graph, module, op)
    of_outputs = (g for g in groups(layout.graph) if g.root.node in meant)
    forward = (g for g in of_outputs if g.phase is Phase.FORWARD)
    return {state for group in forward for state in layout.use_states(group)}


NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
COLUMNS = ("gate_proj", "up_proj")
ROWS = ("down_proj",)
"""Modules of a Llama layer; axis 0 is dp, axis 1 is tp."""


@pytest.mark.parametrize(
    ("name", "vocabulary", "batch", "cluster", "mesh", "gap_ppm"),
    [
        pytest.param(
            "llama-3-70b-16x8xH100", 128_256, 16, "16x8xH100", "16x8", 9000,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "llama-2-70b-16x8xA100", 32_000, 32, "16x8xA100", "32x4", 300,
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_megatron_in_the_node_and_sharded_parameters_across(
    name: str, vocabulary: int, batch: int, cluster: str, mesh: str, gap_ppm: int
) -> None:
    graph = llama_70b(vocabulary, batch)
    plan = found(graph, cluster, mesh, gap_ppm)
    is_h100 = cluster == "16x8xH100"
    check_text(name, graph, plan)
    layout = laid_out(graph, plan.structure.only)
    for module in NORMS:
        # Batch over the nodes, sequence within. On H100, of whole sequences: a fused norm is made
        # again for next to nothing, and backward need not gather its input.
        assert made(layout, module, "mul") == {Sharding((S(0), R if is_h100 else S(1)))}, module
    for module in COLUMNS:
        assert made(layout, module, "mm") == {Sharding((S(0), S(1)))}, module
    for module in ROWS:
        assert made(layout, module, "mm") == {Sharding((S(0), P))}, module
    for module in ATTENTION:
        # By tokens: the smaller weights of attention hide as they are gathered. The larger product
        # of queries is as fast by columns on H100.
        is_tokens = not (is_h100 and module == "q_proj")
        wanted = Sharding((S(0), S(0, 1) if is_tokens else S(1)))
        assert made(layout, module, "mm") == {wanted}, module
    sdpa = [v for k, v in plan.structure.only.ops.items() if k.endswith("self_attn:forward:sdpa.0")]
    assert sdpa == ["b,kv"]
    assert made(layout, "lm_head", "mm") == {Sharding((S(0), S(1)))}
    # The loss is computed of shards of the vocabulary: dim 1 of [tokens, vocabulary].
    assert made(layout, "", "_log_softmax") == {Sharding((S(0), S(1)))}
    for parameter, at in plan.structure.params.items():
        matrix, storage = len(at.shape) == 2, Sharding.parse(at.storage)
        if matrix and at.shape[0] * at.shape[1] > 2**24:
            # Where memory does not bind, gradients of attention are summed as fast as scattered.
            is_whole = is_h100 and any(module in parameter for module in ATTENTION[1:3])
            assert storage.count(R) == is_whole, parameter
    whole, shards = Sharding((S(0), R)), Sharding((S(0), S(1)))
    assert used(layout, "input_layernorm", "mul") == ({shards, whole} if is_h100 else {shards})
    for module in NORMS[1:]:
        assert used(layout, module, "mul") == {whole}, module
    for module in ROWS:
        # On H100 the residual is of whole sequences as well, as the norm that reads it.
        wanted = whole if is_h100 else Sharding((S(0), S(0, 1)))
        assert used(layout, module, "mm") == {wanted}, module


def test_one_slow_link_and_a_small_model_give_data_parallelism() -> None:
    graph = tiny_llama()
    plan = found(graph, "4x1xL4", "4")
    check_text("tiny-llama-4x1xL4", graph, plan)
    assert {(p.storage, p.for_backward) for p in plan.structure.params.values()} == {("[R]", "[R]")}
    layout = laid_out(graph, plan.structure.only)
    for module in (*NORMS, *ATTENTION, *COLUMNS, *ROWS):
        op = "mul" if module in NORMS else "mm"
        assert made(layout, module, op) == {Sharding((S(0),))}, module
    # The sum of the loss and the count of its terms, and one message for all gradients.
    sent = {c.phase: c for c in plan.estimates.stages[0].collectives if c.kind != "slice"}
    assert {(phase, c.kind, c.count) for phase, c in sent.items()} == {
        ("forward", "all_reduce", 2),
        ("backward", "all_reduce", len(plan.structure.params)),
    }
    assert sent["backward"].num_bytes < BUCKET_BYTES
