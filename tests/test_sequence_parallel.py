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

from autopar.codegen import generate
from autopar.runtime.lockstep import train_step
from tests.codegen.models import Case, make_case
from tests.codegen.test_random_plans import difference
from tests.planned import on_h100, plan_for
from tests.sent import Sent, observed

BATCH, SEQ, HIDDEN, KEYS, LAYERS = 2, 16, 32, 16, 2
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
        [("all_to_all", each // 4) for each in (X, K, K, X)],
        # What attention gave is saved by heads, and the gradient of the weight behind it wants it
        # by positions.
        [("all_to_all", each // 4) for each in (X, K, K, X, X)],
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


@cache
def llama() -> Case:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=48,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=48, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 48, (BATCH, SEQ))
    return make_case(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    form, case = FORMS[name], llama()
    mesh = on_h100(form.mesh)[1]
    plan = plan_for(case.traced.graph, form.mesh, form.pins)
    program = generate(case.traced.gm, case.traced.graph, plan)
    step = observed(program, mesh, case.traced.graph, plan.structure, case.tensors)
    assert sends(step.forward) == Counter(list(form.forward) * LAYERS)
    assert sends(step.backward) == Counter(list(form.backward) * LAYERS)
    found = train_step(
        program, mesh, case.traced.graph, plan.structure, case.tensors, tolerance=1e-5
    )
    check(case, found.outputs["loss:0"], found.gradients)


def sends(collectives: Sequence[Sent]) -> Counter[tuple[str, int]]:
    """By kind and bytes given, without the gradients of parameters."""
    return Counter(
        (each.kind, each.before.nbytes) for each in collectives if each.kind != "all_reduce"
    )


def check(case: Case, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
    assert difference(loss, case.loss) < 1e-5
    assert gradients.keys() == case.gradients.keys()
    worst = {n: difference(gradients[n], each) for n, each in case.gradients.items()}
    assert max(worst.values()) < 1e-5, worst
