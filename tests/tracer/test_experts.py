"""Layers of experts of `transformers` are traced as one op, whatever model they are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
)

from autopar.errors import TraceError
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.tracer import torch_private, trace
from autopar.tracer.experts import looped
from tests.zoo import ZOO

Loop = tuple[nn.Module, Callable[[Any, Tensor], Tensor]]
"""A layer of experts, and how it is called on tokens [10, 16]."""

_SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 1,
    "num_experts_per_tok": 2,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 4, "moe_intermediate_size": 12, "num_experts": 4},
    "Olmoe": {"intermediate_size": 12, "num_experts": 4},
    "DeepseekV3": {
        "moe_intermediate_size": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4,
    },
}  # fmt: skip


def built(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**_SMALL, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def experts_in(model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    """The ops that compute experts, in order."""
    nodes = trace(model, (), inputs).graph.nodes
    return [node.op for node in nodes if node.op in (FORWARD, BACKWARD) or "grouped_mm" in node.op]


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_one_op(name: str) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    assert experts_in(built(name), {"input_ids": ids, "labels": ids}) == [FORWARD, BACKWARD]


def test_a_gate_that_is_not_known_is_left_to_the_library() -> None:
    model, inputs = ZOO["grouped"]()
    found = experts_in(model, inputs)
    assert found
    assert not {FORWARD, BACKWARD} & set(found)


def longcat() -> Loop:
    """The last experts return what they get."""
    sizes = {"hidden_size": 16, "expert_ffn_hidden_size": 12}
    config = transformers.LongcatFlashConfig(**sizes, n_routed_experts=3, zero_expert_num=2)
    return LongcatFlashExperts(config), lambda layer, x: layer(x, *routed(x, 5))


def dbrx() -> Loop:
    sizes = {"hidden_size": 16, "ffn_hidden_size": 12}
    layer = DbrxExperts(DbrxFFNConfig(**sizes, moe_num_experts=4))
    return layer, lambda layer, x: layer(x.view(2, 5, 16), *routed(x, 4))


SWITCH = {"d_model": 16, "d_ff": 12, "num_experts": 3}


def switch() -> Loop:
    """Told by a mask, without a one where no expert has room."""
    config = transformers.SwitchTransformersConfig(**SWITCH, dropout_rate=0.0)
    mask = nn.functional.one_hot(torch.randint(3, (10, 1)), 3)
    mask[::4] = 0
    return SwitchTransformersExperts(config), lambda layer, x: layer(x, mask, x[:, :1].sigmoid())


def jetmoe(kind: type[nn.Module]) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 12, "kv_channels": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return kind(transformers.JetMoeConfig(**sizes))


LOOPS: dict[str, Callable[[], Loop]] = {
    "LongcatFlash": longcat,
    "DBRX": dbrx,
    "SwitchTransformers": switch,
    "JetMoe": lambda: (jetmoe(JetMoeMoE), lambda layer, x: layer(x.view(2, 5, 16))),
    "JetMoe's attention": lambda: (jetmoe(JetMoeMoA), attend),
}


def attend(layer: Any, x: Tensor) -> Tensor:
    queries, _, sorted_by = layer.map(x.view(2, 5, 16))
    return layer.reduce(queries, sorted_by)


def routed(x: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The experts that each token goes to, and their weights."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(len(x), experts, generator=generator).argsort(1)[:, :3]
    return chosen, x[:, :3].sigmoid()


@pytest.mark.parametrize("family", LOOPS)
def test_loops_over_the_experts_that_have_tokens(family: str) -> None:
    layer, call = LOOPS[family]()
    layer.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    inputs = (x, *layer.parameters())
    expected = call(layer, x)
    wanted = torch.autograd.grad(expected.square().sum(), inputs, materialize_grads=True)
    for module in layer.modules():
        forward = looped(module)
        if forward is not None:
            module.forward = forward
    with torch_private.compiling():  # as in a trace
        found = call(layer, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), wanted)
    with (
        torch_private.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch_private.compiling(),
    ):
        assert call(layer, mode.from_tensor(x)).shape == expected.shape


def test_experts_that_drop_out_are_left() -> None:
    """What is dropped depends on how many tokens each has."""
    layer = SwitchTransformersExperts(transformers.SwitchTransformersConfig(**SWITCH))
    assert looped(layer) is None
    assert looped(layer.eval()) is not None
    assert looped(nn.ModuleDict({"expert_0": nn.Linear(2, 2)})) is None


def test_dropout_of_experts_is_told() -> None:
    config = transformers.SwitchTransformersConfig(**SWITCH)
    mask = nn.functional.one_hot(torch.randint(3, (10, 1)), 3)
    with pytest.raises(TraceError, match=r"nonzero.*\n.*config\.dropout_rate"):
        trace(SwitchTransformersExperts(config), (torch.randn(10, 16), mask, torch.rand(10, 1)))


def test_the_model_is_as_before() -> None:
    model, inputs = ZOO["mixtral"]()
    assert experts_in(model, inputs) == [FORWARD, BACKWARD]
    assert model.config._experts_implementation == "eager"
    assert "autopar" not in ALL_EXPERTS_FUNCTIONS
