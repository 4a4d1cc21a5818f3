"""Attention on pieces of the sequence, alone between pointwise ops: each form, with and without
a mask, sends exactly the bytes of its formula, keeps shards alone for backward and computes what
eager does, to the last gradient.

Queries, keys and values are made of parameters on shards, so that all that is sent is theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.plans.plan import Plan
from autopar.rules.attention import BACKWARD, FORWARD, RING
from autopar.runtime.simulator import spmd
from autopar.tracer import Traced, trace
from tests.codegen.test_random_plans import difference
from tests.held import HandedOver, Held
from tests.layouts import program_of
from tests.planned import on_h100, plan_for
from tests.sent import Sent, backward_inputs, observed, received

BATCH, HEADS, GROUPS, SEQ, HEAD_DIM = 2, 8, 4, 24, 6
ROWS = 4
"""Of a picture, whose positions are a sequence."""
N = 4
Q = 8 * BATCH * HEADS * SEQ * HEAD_DIM
KV = 2 * 8 * BATCH * GROUPS * SEQ * HEAD_DIM
LSE = Q // HEAD_DIM
"""Bytes of the queries (and of the result), of keys and values together, of the lse."""


class Attention(nn.Module):
    def __init__(self, kind: str, keys: int = SEQ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, heads, length in (("q", HEADS, SEQ), ("k", GROUPS, keys), ("v", GROUPS, keys)):
            shape = BATCH, length, heads, HEAD_DIM
            value = torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2)
            if kind == "grid":
                value = value.unflatten(2, (ROWS, -1))
            self.register_parameter(name, nn.Parameter(value))
        self.kind = kind

    def forward(self, mask: Tensor | None = None) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(
            *(2 * x.flatten(2, -2) for x in (self.q, self.k, self.v)), attn_mask=mask,
            dropout_p=0.3 if self.kind == "dropout" else 0.0,
            is_causal=self.kind in ("causal", "dropout"), enable_gqa=True,
        )  # fmt: skip
        return torch.tanh(out).sum()


def inputs(kind: str) -> tuple[Tensor, ...]:
    """Row 3 attends to nothing at all, row 9 to nothing of the first piece."""
    if kind != "masked":
        return ()
    mask = torch.rand(BATCH, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, :, 3] = False
    mask[0, :, 9, : SEQ // 2] = False
    return (mask,)


@cache
def traced(kind: str, keys: int = SEQ) -> Traced:
    return trace(Attention(kind, keys), inputs(kind))


@dataclass(frozen=True)
class Form:
    """The choice of attention and how its result is saved; bytes that each rank gets, forward and
    backward."""

    choice: str
    out: str
    forward: float
    backward: float


A2A = (N - 1) / N / N
GATHERED = (N - 1) / N
STEPS = N - 1
HALF = 1 / N / 2
FORMS = {
    "heads by all-to-all": Form("kv", "[S(1)]", A2A * (2 * Q + KV), A2A * (3 * Q + 2 * KV)),
    "gathered": Form("s", "[S(2)]", GATHERED * KV, GATHERED * 2 * KV),
    "ring": Form("ring", "[S(2)]", STEPS * KV / N, STEPS * 2 * KV / N),
    # Halves of shards: of queries, result and lse, and in backward of two gradients besides.
    "gathered, zig-zag": Form(
        "s_zigzag",
        "[S(2)]",
        GATHERED * KV + HALF * (2 * Q + LSE),
        GATHERED * 2 * KV + HALF * (4 * Q + LSE),
    ),
    "ring, zig-zag": Form(
        "ring_zigzag",
        "[S(2)]",
        STEPS * KV / N + HALF * (2 * Q + KV + LSE),
        STEPS * 2 * KV / N + HALF * (4 * Q + 2 * KV + LSE),
    ),
}


def pins(form: Form) -> dict[str, str]:
    return {
        r"param:.*": "[S(2)]|[S(2)]",
        r":(forward|backward):sdpa(_backward)?\.0": form.choice,
        r":(forward|backward):(mul|tanh|tanh_backward)\.\d": "d2",
        r":forward:sum\.0": "d2",
        r"saved::forward:sdpa\.0\.0": form.out,
        r"saved::forward:(mul|tanh)\.\d": "[S(2)]",
    }


CASES = [
    (name, kind)
    for name in FORMS
    for kind in ("full", "causal", "masked")
    if (name, kind) != ("ring", "masked") and (kind == "causal" or "zig-zag" not in name)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_form_sends_and_keeps_what_its_formulas_say(name: str, kind: str) -> None:
    form, case, mesh = FORMS[name], traced(kind), on_h100(str(N))[1]
    plan = plan_for(case.graph, str(N), pins(form))
    program = program_of(case, plan.structure.only)
    step = observed(program, mesh, case.graph, plan.structure, tensors(kind))
    assert received(step.forward, mesh) == form.forward
    assert received(step.backward, mesh) == form.backward
    assert priced(plan) == {"forward": emitted(step.forward), "backward": emitted(step.backward)}
    kept = [value for value in step.saved if value.dtype != torch.bool]
    # The result of tanh is as large as that of attention.
    assert sum(value.nbytes for value in kept) == (3 * Q + KV + LSE) // N
    check_equal(plan, str(N), kind, SEQ)


@pytest.mark.breadth(5)
@pytest.mark.parametrize(
    ("kind", "on", "choice", "keys"),
    [
        ("causal", "2x2", "s,s", SEQ),
        ("causal", "3", "ring", SEQ),
        ("full", "2", "ring", SEQ),
        ("causal", "2x2", "kv,ring", SEQ),
        ("full", "2x2", "ring,b", SEQ),
        ("masked", "2x2", "s,g", SEQ),
        ("causal", "2x2", "s,s", SEQ // 2),
        ("causal", "2x2", "s,s", 2 * SEQ),
        ("full", "4", "ring", SEQ // 2),
        ("full", "4", "ring", 2 * SEQ),
        ("grid", "2", "ring", SEQ),
        ("causal", "3", "ring_zigzag", SEQ),
        ("causal", "3", "s_zigzag", SEQ),
        ("causal", "8", "ring_zigzag", SEQ),
        ("causal", "8", "s_zigzag", SEQ),
        ("causal", "24", "ring_zigzag", SEQ),
        ("causal", "24", "s_zigzag", SEQ),
        ("causal", "2x2", "kv,ring_zigzag", SEQ),
        ("causal", "2x2", "s_zigzag,b", SEQ),
        ("grid", "2", "ring.1", SEQ),
        ("grid", "2x2", "ring.1,s.0", 2 * SEQ),
    ],
)
def test_forms_together_and_with_other_keys_than_queries(
    kind: str, on: str, choice: str, keys: int
) -> None:
    chosen = {r":(forward|backward):sdpa(_backward)?\.0": choice}
    check_equal(plan_for(traced(kind, keys).graph, on, chosen), on, kind, keys)


def test_dropout_of_attention_on_shards_of_the_queries() -> None:
    """It is spelled out, so that weights can be dropped: no op of attention, and no ring."""
    graph = traced("dropout").graph
    assert not any(node.op in (FORWARD, BACKWARD) for node in graph.nodes)
    chosen = {
        r":forward:bmm\.\d": "m",
        r":forward:_safe_softmax\.0": "d2",
        r":backward:_softmax_backward_data\.0": "d2",
    }
    check_equal(plan_for(graph, str(N), chosen), str(N), "dropout", SEQ)


@pytest.mark.parametrize(("kind", "keys"), [("masked", SEQ), ("causal", SEQ // 2)])
def test_where_no_ring_is_offered(kind: str, keys: int) -> None:
    """A mask has columns that do not go round; under a causal one blocks of keys must lie as those
    of queries do."""
    ops = [node for node in traced(kind, keys).graph.nodes if node.op in (FORWARD, BACKWARD)]
    assert len(ops) == 2
    assert not any(factor.name == RING for node in ops for factor in node.factors)


@pytest.mark.parametrize("name", ["ring, zig-zag", "gathered, zig-zag"])
def test_what_zigzag_order_takes_is_covered_by_its_price(name: str) -> None:
    for n in (N, 2 * N):
        _, peak, limit = held(FORMS[name], "causal", n)
        assert peak <= limit


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_ring_holds_shards_alone(kind: str) -> None:
    """Twice the ranks halve all that a rank holds, of which no tensor is larger than its shard of
    the queries; what is priced covers it."""
    shards = {n: held(FORMS["ring"], kind, n) for n in (N, 2 * N)}
    for n, (largest, peak, limit) in shards.items():
        assert largest == max(Q, KV) // n
        assert peak <= limit
    assert 2 * shards[2 * N][1] <= shards[N][1] + 64
    assert held(FORMS["gathered"], kind, N)[0] >= KV // 2


def held(form: Form, kind: str, n: int) -> tuple[int, int, int]:
    """(largest tensor, most held at a time, what that was priced) in bytes on each of `n` ranks,
    without parameters and their gradients."""
    case, mesh = traced(kind), on_h100(str(n))[1]
    plan = plan_for(case.graph, str(n), pins(form))
    program = program_of(case, plan.structure.only)
    given = spmd.RankStep(mesh, case.graph, plan.structure.only, 0.0, {}).split(
        program.forward_inputs, tensors(kind)
    )
    assert program.backward is not None
    with Held() as watched:
        results = spmd.run(program.forward, mesh, given)
        inputs = [HandedOver(each) for each in backward_inputs(program, results)]
        del results
        spmd.run(program.backward, mesh, inputs)
    memory = plan.estimates.memory
    return watched.largest, watched.peak // n, memory.saved + memory.unsharded + memory.transient


def priced(plan: Plan) -> dict[str, Counter[str]]:
    """By phase and kind, the bytes that each rank gives to collectives."""
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for each in plan.estimates.stages[0].collectives:
        if each.kind != "slice":
            found[each.phase][each.kind] += each.num_bytes
    return found


def emitted(collectives: Sequence[Sent]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in collectives:
        found[each.kind] += each.before.nbytes
    return found


def tensors(kind: str, keys: int = SEQ) -> dict[str, Tensor]:
    parameters = {f"param:{n}": p.detach() for n, p in Attention(kind, keys).named_parameters()}
    return parameters | {f"input:{i}": x for i, x in enumerate(inputs(kind))}


def check_equal(plan: Plan, on: str, kind: str, keys: int) -> None:
    case, mesh, model = traced(kind, keys), on_h100(on)[1], Attention(kind, keys)
    program = program_of(case, plan.structure.only)
    torch.manual_seed(7)
    found = spmd.train_step(program, mesh, case.graph, plan.structure.only, tensors(kind, keys))
    torch.manual_seed(7)
    loss = model(*inputs(kind))
    loss.backward()
    assert difference(found.outputs["loss:0"], loss.detach()) < 1e-12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert difference(found.gradients[name], parameter.grad) < 1e-9, name
