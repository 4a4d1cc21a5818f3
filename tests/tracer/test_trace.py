"""The traced graph computes what eager computes, and the model comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import Phase, Role
from autopar.tracer import trace
from autopar.tracer.torch_private import tree_flatten, tree_unflatten
from tests.tracer.execute import assert_gradients, close, run
from tests.tracer.models import VOCAB, gpt2, llama, mlp, token_inputs

FLOAT32_RTOL = 1e-5
FLOAT64_RTOL = 1e-12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Loss(nn.Module):
    """A model's sum of squares."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


def test_mlp_in_float64() -> None:
    model, x = Loss(mlp()).double(), torch.randn(2, 8, dtype=torch.float64)
    results = run(trace(model, (x,)), model, (x,), {}, {"0": torch.ones((), dtype=x.dtype)})
    loss = model(x)
    loss.backward()
    close(results["loss:0"], loss.detach(), FLOAT64_RTOL)
    assert_gradients(results, model, FLOAT64_RTOL)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("build", "more"),
    [
        (gpt2, {}),
        (llama, {}),
        (llama, {"tie_word_embeddings": True}),
        (llama, {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["gpt2", "llama", "llama-tied", "llama-bias"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "attention_mask"])
def test_language_models(build: Any, more: dict[str, Any], masked: bool) -> None:
    model, inputs = build(**more), token_inputs()
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, -2:] = 0
    traced = trace(model, (), inputs, strict=True)
    assert any(node.op == "autopar.sdpa.default" for node in traced.graph.nodes)
    results = run(traced, model, (), inputs)
    expected = model(**inputs)
    expected.loss.backward()
    close(results["loss:0"], expected.loss.detach(), FLOAT32_RTOL)
    close(results["detached:1"], expected.logits.detach(), FLOAT32_RTOL)
    assert_gradients(results, model, FLOAT32_RTOL)


def test_without_mask_no_mask_is_built() -> None:
    graph = trace(llama(), (), token_inputs()).graph
    attention = [n for n in graph.nodes if n.op == "autopar.sdpa.default"]
    assert [n.args[3:5] for n in attention] == [(None, True)] * 2
    assert [graph.input_types(n)[1].shape[1] for n in attention] == [2, 2]


def test_attention_dropout_is_spelled_out() -> None:
    graph = trace(gpt2(dropout=0.1).train(), (), token_inputs()).graph
    ops = {node.op for node in graph.nodes}
    assert "aten.native_dropout.default" in ops
    assert "autopar.sdpa.default" not in ops
    assert "autopar.sdpa.default" in {
        n.op for n in trace(gpt2(dropout=0.1).eval(), (), token_inputs()).graph.nodes
    }


@pytest.mark.parametrize("window", [None, 3])
def test_sliding_window_keeps_its_mask(window: int | None) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(
        MistralConfig(
            num_hidden_layers=1,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCAB,
            sliding_window=window,
        )
    )
    inputs = token_inputs()
    results = run(trace(model, (), inputs), model, (), inputs)
    expected = model(**inputs)
    expected.loss.backward()
    close(results["detached:1"], expected.logits.detach(), FLOAT32_RTOL)
    assert_gradients(results, model, FLOAT32_RTOL)


def test_tied_weights_have_one_placeholder_and_one_gradient() -> None:
    traced = trace(gpt2(), (), token_inputs())
    assert traced.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "param:lm_head.weight" not in traced.inputs
    grads = [n.target for n in traced.graph.with_role(Role.GRAD)]
    assert len(grads) == len(set(grads)) == len(traced.graph.with_role(Role.PARAM))


class Nested(nn.Module):
    """Keyword arguments, nested inputs and outputs, an option, and results of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, pair: tuple[Tensor, Tensor], *, scale: float = 1.0, extra: dict[str, Tensor]
    ) -> dict[str, Any]:
        y = self.linear(pair[0]) * scale + extra["bias"]
        loss = (y - pair[1]).square().mean()
        return {"loss": loss, "more": [y, (y > 0), None], "name": "nested"}


def test_nested_inputs_and_outputs_are_rebuilt() -> None:
    model = Nested()
    args = ((torch.randn(3, 4), torch.randn(3, 4)),)
    kwargs = {"scale": 2.0, "extra": {"bias": torch.randn(4)}}
    traced = trace(model, args, kwargs)
    assert traced.inputs[2:] == ("input:0", "input:1", "input:3", "tangent:0")
    assert traced.in_spec == tree_flatten((args, kwargs))[1]
    assert [n.role for n in traced.graph.nodes if n.op == "output"][:3] == [
        Role.LOSS,
        Role.DETACHED,
        Role.DETACHED,
    ]
    results = list(run(traced, model, args, kwargs).values())
    leaves = [x.value if x.item is None else results[x.item] for x in traced.outputs]
    rebuilt, expected = tree_unflatten(leaves, traced.out_spec), model(*args, **kwargs)
    assert rebuilt["name"] == "nested"
    assert rebuilt["more"][2] is None
    close(rebuilt["loss"], expected["loss"].detach(), FLOAT32_RTOL)
    close(rebuilt["more"][0], expected["more"][0].detach(), FLOAT32_RTOL)
    assert torch.equal(rebuilt["more"][1], expected["more"][1])


class TwoHeads(nn.Module):
    """Two results, the second a view of the first, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y.view(-1, 2, 3), x


def test_without_a_loss_every_differentiable_output_has_a_tangent() -> None:
    model, x = TwoHeads(), torch.randn(5, 4)
    traced = trace(model, (x,))
    tangents = {"0": torch.randn(5, 6), "1": torch.randn(5, 2, 3)}
    results = run(traced, model, (x,), {}, tangents)
    assert list(results)[:3] == ["value:0", "value:1", "detached:2"]
    y, z, _ = model(x)
    torch.autograd.backward((y, z), (tangents["0"], tangents["1"]))
    close(results["value:1"], z.detach(), FLOAT32_RTOL)
    assert torch.equal(results["detached:2"], x)
    assert_gradients(results, model, FLOAT32_RTOL)


class RunningMean(nn.Module):
    """Changes its buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.steps += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y - self.mean


def test_buffers_that_change_are_outputs() -> None:
    model = RunningMean()
    x = torch.randn(5, 4)
    traced = trace(model, (x,))
    results = run(traced, model, (x,), {}, {"0": torch.ones(5, 4)})
    y = model(x)
    close(results["mutation:mean"], model.mean, FLOAT32_RTOL)
    assert results["mutation:steps"] == model.steps == 1
    close(results["value:0"], y.detach(), FLOAT32_RTOL)
    assert all(n.phase is Phase.FORWARD for n in traced.graph.with_role(Role.MUTATION))


def test_forward_only_where_nothing_is_differentiated() -> None:
    model, inputs = llama(), token_inputs()
    with torch.no_grad():
        without_grad = trace(model, (), inputs)
    model.requires_grad_(requires_grad=False)
    frozen = trace(model, (), inputs)
    for traced in (without_grad, frozen):
        graph = traced.graph
        assert all(n.phase is Phase.FORWARD for n in graph.nodes)
        assert not graph.with_role(Role.TANGENT, Role.GRAD)
        results = run(traced, model, (), inputs)
        close(results["loss:0"], model(**inputs).loss, FLOAT32_RTOL)


def test_frozen_parameters_have_no_gradient() -> None:
    model, x = Loss(mlp()), torch.randn(2, 8)
    model.model[0].requires_grad_(requires_grad=False)
    results = run(trace(model, (x,)), model, (x,), {})
    model(x).backward()
    assert_gradients(results, model, FLOAT32_RTOL)


class Labels(nn.Module):
    """Mean cross entropy where targets may all be ignored in part of the batch."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.register_buffer("weight", torch.arange(1.0, 6.0) if weighted else None)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), target, self.weight)


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_loss_is_a_sum_and_a_division(weighted: bool) -> None:
    model, x = Labels(weighted), torch.randn(4, 4)
    target = torch.tensor([1, -100, -100, 3])
    traced = trace(model, (x, target))
    losses = [n for n in traced.graph.nodes if n.op.startswith("aten.nll_loss")]
    assert [n.args[3 if "forward" in n.op else 4] for n in losses] == [2, 2]
    results = run(traced, model, (x, target), {})
    loss = model(x, target)
    loss.backward()
    close(results["loss:0"], loss.detach(), FLOAT32_RTOL)
    assert_gradients(results, model, FLOAT32_RTOL)


def test_the_same_model_gives_the_same_graph() -> None:
    first, second = (trace(gpt2(), (), token_inputs(seed)) for seed in (0, 1))
    assert str(first.graph) == str(second.graph)
    assert first.graph == second.graph
