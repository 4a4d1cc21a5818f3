"""Every form of sequence parallelism: what it sends, to the byte, and that it computes what eager
does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.rules.attention import FORWARD
from autopar.runtime.simulator.spmd import train_step
from tests.codegen import models
from tests.codegen.models import Case, make_case
from tests.codegen.test_random_plans import difference
from tests.layouts import program_of
from tests.planned import on_h100, plan_for
from tests.sent import Sent, observed

BATCH, SEQ, HIDDEN, KEYS, LAYERS = 2, 24, 32, 16, 2
X, K = (BATCH * SEQ * width * 4 for width in (HIDDEN, KEYS))
"""Bytes of the hidden states, of the queries and of what attention gives; of the keys or values."""

LAYER = r"model\.layers\.\*"
ATTENTION = LAYER + r"\.self_attn"
STORED = r"param:.*"
ENDS = {
    r"model\.embed_tokens:.*": "d1",
    r"lm_head:forward:mm\.0": "m.1",
    r"lm_head:backward:mm\.0": "k.1",
    r"lm_head:backward:mm\.1": "m.1",
    r":(forward|backward):(nll_loss|_log_softmax).*": "d0.1",
}
NORMS = {
    r"model\.(layers\.\*\.\w+_layer)?norm:(forward|backward):"
    r"(pow|mul|div|add|sum|mean|rsqrt)\.\d": "d1",
    rf"{LAYER}:forward:add\.\d": "d1",
}
SAVED = {
    rf"saved:{ATTENTION}:forward:add\.1": "[S(2)]",
    rf"saved:{ATTENTION}\.v_proj:forward:mm\.0": "[S(0.1)]",
}
"""Keys and values handed to backward in shards."""


def every(choice: Mapping[str, str]) -> dict[str, str]:
    """All matmuls of the layers on `choice`: "forward", "weights" (their gradients), "inputs"."""
    return {
        rf"{LAYER}.*_proj:forward:mm\.0": choice["forward"],
        rf"{LAYER}.*_proj:backward:mm\.0": choice["weights"],
        rf"{LAYER}.*_proj:backward:mm\.1": choice["inputs"],
    }


ON_SHARDS = {
    STORED: "[R]|[R]",
    **ENDS,
    **NORMS,
    **every({"forward": "m.1", "weights": "k.1", "inputs": "m.1"}),
    rf"{LAYER}.*_proj:backward:add\.0": "d1",
}
MEGATRON = {
    rf"param:{ATTENTION}\.[qkv]_proj\.weight": "[S(0)]|[S(0)]",
    rf"param:{ATTENTION}\.o_proj\.weight": "[S(1)]|[S(1)]",
    rf"param:{LAYER}\.mlp\.(gate|up)_proj\.weight": "[S(0)]|[S(0)]",
    rf"param:{LAYER}\.mlp\.down_proj\.weight": "[S(1)]|[S(1)]",
    r"param:.*(norm|embed_tokens|lm_head)\.weight": "[R]|[R]",
    rf"{ATTENTION}:.*sdpa.*": "kv",
    rf"{LAYER}\.mlp:(forward|backward):mul\.\d": "d2",
    rf"{LAYER}\.(self_attn\.[kq]|mlp\.gate)_proj:backward:add\.0": "+0",
    rf"saved:{LAYER}\.\w+_layernorm:forward:mul\.1": "[S(1)]",
}


@dataclass(frozen=True)
class Form:
    """Decisions, and (kind, bytes of the input on each rank) of everything a layer sends forward
    and backward, over the axes; gradients of parameters and single numbers are left out."""

    mesh: str
    pins: Mapping[str, str]
    forward: Sequence[tuple[str, int]]
    backward: Sequence[tuple[str, int]]


FORMS = {
    "norms on shards": Form(
        "4", {**ENDS, **NORMS, **MEGATRON},
        [*[("all_gather", X // 4)] * 2, *[("reduce_scatter", X)] * 2],
        [*[("all_gather", X // 4)] * 4, *[("reduce_scatter", X)] * 2],
    ),
    "heads by all-to-all": Form(
        "4",
        {**ON_SHARDS, rf"{ATTENTION}:.*sdpa.*": "kv",
         rf"saved:{ATTENTION}:forward:sdpa\.0\.0": "[S(1)]"},
        # Keys and values are few bytes: they are gathered and cut, which starts 0.2 us sooner.
        [*[("all_to_all", X // 4)] * 2, *[("all_gather", K // 4)] * 2],
        # What attention gave is saved by heads, and the gradient of the weight behind it wants it
        # by positions.
        [*[("all_to_all", X // 4)] * 3, *[("all_gather", K // 4)] * 2],
    ),
    "context, gathered": Form(
        "4", {**ON_SHARDS, **SAVED, rf"{ATTENTION}:.*sdpa.*": "s"},
        [("all_gather", K // 4)] * 2,
        [*[("all_gather", K // 4)] * 2, *[("reduce_scatter", K)] * 2],
    ),
    "context, ring": Form(
        "4", {**ON_SHARDS, **SAVED, rf"{ATTENTION}:.*sdpa.*": "ring"},
        [("permute", 2 * K // 4)] * 3,
        [("permute", 2 * K // 4)] * 6,
    ),
}  # fmt: skip


def and_tensor(attention: str) -> dict[str, str]:
    """The sequence on the first axis, heads and the inner dim of the MLP on the second."""
    return {
        STORED: "[R, R]|[R, R]",
        **{pattern: f"{label},-" for pattern, label in (ENDS | NORMS).items()},
        rf"{ATTENTION}:.*sdpa.*": f"{attention},kv",
        rf"{LAYER}\.mlp:(forward|backward):mul\.\d": "d1,d2",
        rf"{ATTENTION}\.[qkv]_proj:forward:mm\.0": "m.1,n.0",
        rf"{LAYER}\.mlp\.(gate|up)_proj:forward:mm\.0": "m.1,n",
        rf"{ATTENTION}\.o_proj:forward:mm\.0": "m.1,k.0",
        rf"{LAYER}\.mlp\.down_proj:forward:mm\.0": "m.1,k",
        rf"{ATTENTION}\.[qkv]_proj:backward:mm\.0": "k.1,m.0",
        rf"{LAYER}\.mlp\.(gate|up)_proj:backward:mm\.0": "k.1,m",
        rf"{ATTENTION}\.[qkv]_proj:backward:mm\.1": "m.1,k.0",
        rf"{LAYER}\.mlp\.(gate|up)_proj:backward:mm\.1": "m.1,k",
        rf"saved:{ATTENTION}:forward:add\.1": "[S(2), S(1)]",
        rf"saved:{ATTENTION}\.v_proj:forward:mm\.0": "[S(0.1), S(1)]",
    }


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("attention", "forward", "backward"),
    [
        ("s", [("all_gather", K // 4)] * 2,
         [*[("all_gather", K // 4)] * 2, *[("reduce_scatter", K // 2)] * 2]),
        ("ring", [("permute", 2 * K // 4)], [("permute", 2 * K // 4)] * 2),
    ],
)  # fmt: skip
def test_context_beside_tensor_parallelism(
    attention: str, forward: list[tuple[str, int]], backward: list[tuple[str, int]]
) -> None:
    """Each rank sends the keys and values of its own heads, along the axis of the sequence, among
    the gradients of weights."""
    case, mesh = llama(), on_h100("2x2")[1]
    plan = plan_for(case.traced.graph, "2x2", and_tensor(attention))
    program = program_of(case.traced, plan.structure.only)
    step = observed(program, mesh, case.traced.graph, plan.structure, case.tensors)
    for collectives, expected in ((step.forward, forward), (step.backward, backward)):
        found = sends(collectives, mesh.names[0])
        assert {each: found[each] for each in expected} == Counter(expected * LAYERS)
    gathered = sends([*step.forward, *step.backward], mesh.names[0])["all_gather", K // 4]
    assert gathered == (4 * LAYERS if attention == "s" else 0)
    check_equal(case, "2x2", and_tensor(attention))


def model(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=48,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=48, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@cache
def llama() -> Case:
    network = model(LAYERS)
    ids = torch.randint(0, 48, (BATCH, SEQ))
    return make_case(network, {"input_ids": ids, "labels": ids})


def padded() -> Case:
    network = model(1)
    ids = torch.randint(0, 48, (BATCH, SEQ))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return make_case(
        network,
        {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
    )


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    check_form(FORMS[name], llama())


def check_form(form: Form, case: Case) -> None:
    """The form sends along the first axis what it says, and its step is eager's."""
    mesh = on_h100(form.mesh)[1]
    plan = plan_for(case.traced.graph, form.mesh, form.pins)
    program = program_of(case.traced, plan.structure.only)
    step = observed(program, mesh, case.traced.graph, plan.structure, case.tensors)
    name = mesh.names[0]
    assert sends(step.forward, name) == Counter(list(form.forward) * LAYERS)
    assert sends(step.backward, name) == Counter(list(form.backward) * LAYERS)
    found = train_step(
        program, mesh, case.traced.graph, plan.structure.only, case.tensors, tolerance=1e-5
    )
    check(case, found.outputs["loss:0"], found.gradients)


def sends(collectives: Sequence[Sent], axis: str) -> Counter[tuple[str, int]]:
    """By kind and bytes given along `axis`, without the gradients of parameters."""
    return Counter(
        (each.kind, each.before.nbytes)
        for each in collectives
        if each.axis == axis and each.kind != "all_reduce"
    )


def check(case: Case, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
    assert difference(loss, case.loss) < 1e-5
    assert gradients.keys() == case.gradients.keys()
    worst = {n: difference(gradients[n], each) for n, each in case.gradients.items()}
    assert max(worst.values()) < 1e-5, worst


def test_a_sequence_cut_by_two_axes_under_a_causal_mask() -> None:
    """GPT-2, whose positions are a parameter: what nests how is seen from the values."""
    case = models.case("gpt2")
    pins = {r"transformer\.h\.\*\.attn:.*sdpa.*": "s,s"}
    check_equal(case, "2x2", pins)


def test_queries_on_shards_under_a_mask_that_the_model_makes() -> None:
    """Padding gives attention a mask of four dims, cut as the queries are."""
    case = padded()
    assert any(node.op == FORWARD and len(node.inputs) == 4 for node in case.traced.graph.nodes)
    check_equal(case, "2", {rf"{ATTENTION}:.*sdpa.*": "s"})


def check_equal(case: Case, on: str, pins: Mapping[str, str]) -> None:
    plan = plan_for(case.traced.graph, on, pins)
    program = program_of(case.traced, plan.structure.only)
    found = train_step(
        program,
        on_h100(on)[1],
        case.traced.graph,
        plan.structure.only,
        case.tensors,
        tolerance=1e-5,
    )
    check(case, found.outputs["loss:0"], found.gradients)
