"""The masks of a traced model of `transformers` are those that eager hands to sdpa."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopar
from autopar.tracer import trace
from tests.zoo import ZOO
from tests.zoo.cases import make_case, moved
from tests.zoo.decoders import BATCH, SEQ, SHAPE, VOCAB, tokens
from tests.zoo.equality import check_any_plan


class Loss(nn.Module):
    """A model that is asked for its loss, whatever else it gives, and makes a cache or not."""

    def __init__(self, model: nn.Module, use_cache: bool | None = None) -> None:
        super().__init__()
        self.model, self.use_cache = model, use_cache

    def forward(self, **inputs: Tensor) -> Tensor:
        if self.use_cache is not None:
            return self.model(**inputs, use_cache=self.use_cache).loss
        return self.model(**inputs).loss


def llama(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "use_cache": True, **more}))


def doge() -> nn.Module:
    """Adds what it learns to a mask that it always wants."""
    return hf.DogeForCausalLM(hf.DogeConfig(**SHAPE, keep_window_size=4, hidden_dropout=0.0))


def switch() -> nn.Module:
    shape = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "vocab_size": VOCAB}
    config = hf.SwitchTransformersConfig(
        **shape, num_layers=1, num_decoder_layers=1, dropout_rate=0.0, decoder_start_token_id=0
    )
    config.encoder_sparse_step = config.decoder_sparse_step = 0  # no layer of experts
    return hf.SwitchTransformersForConditionalGeneration(config)


def long_t5() -> nn.Module:
    shape = {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 4, "vocab_size": VOCAB}
    config = hf.LongT5Config(
        **shape, num_layers=1, num_decoder_layers=1, local_radius=3, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.LongT5ForConditionalGeneration(config)


def as_eager(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Loss and gradients of a random plan are eager's."""
    torch.manual_seed(0)
    check_any_plan(make_case(moved(model), inputs), (2,), 0)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("build", [doge, switch, long_t5])
def test_masks_that_a_model_wants_its_own_way(build: Callable[[], nn.Module]) -> None:
    as_eager(Loss(build()), tokens())


PACKED = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]).expand(BATCH, SEQ)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("default", "use_cache"), [(True, None), (True, False), (False, None)])
def test_packed_positions(default: bool, use_cache: bool | None) -> None:
    """`transformers` keeps packed sequences apart where it makes no cache, and only there."""
    model = Loss(llama(use_cache=default), use_cache)
    as_eager(model, {**tokens(), "position_ids": PACKED})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_cache", [None, True])
def test_packed_positions_of_checkpointed_layers(use_cache: bool | None) -> None:
    """`transformers` makes no cache in training with checkpoints, whatever it is told."""
    found: list[Tensor] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = Loss(llama(use_cache=True), use_cache).train()
        model.model.gradient_checkpointing_enable()
        loss = (autopar.compile(model) if compiled else model)(**tokens(), position_ids=PACKED)
        loss.backward()
        found.append(
            torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())])
        )
    torch.testing.assert_close(*found)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_padding(side: str) -> None:
    inputs = tokens()
    mask = torch.ones_like(inputs["input_ids"])
    if side != "none":
        mask[1, :3] = 0
    as_eager(Loss(llama()), {**inputs, "attention_mask": mask if side == "left" else mask.flip(1)})


class Prefix(nn.Module):
    """Sees the first tokens from everywhere, and never its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        mask = create_causal_mask(
            self.model.config,
            self.model.get_input_embeddings()(input_ids),
            None,
            None,
            or_mask_function=lambda b, h, q, k: k < 3,
            and_mask_function=lambda b, h, q, k: (q != k) | (k < 3),
        )
        return self.model(input_ids, labels=labels, attention_mask=mask).loss


def test_masks_from_functions() -> None:
    as_eager(Prefix(), tokens())


def plain_masks(model: nn.Module) -> list[bool]:
    """Of each attention of a traced model, whether it has no mask."""
    graph = make_case(moved(model), tokens()).traced.graph
    return [len(n.inputs) == 3 for n in graph.nodes if n.op == "autopar.sdpa.default"]


@pytest.mark.parametrize("use_cache", [False, True])
def test_no_mask_where_nothing_is_masked(use_cache: bool) -> None:
    assert plain_masks(Loss(llama(use_cache=use_cache))) == [True]


def test_attention_that_a_user_wrote_is_traced_as_it_is() -> None:
    def mean(module: Any, query: Any, key: Any, value: Tensor, *_: Any, **__: Any) -> Any:
        return value.mean(2, keepdim=True).expand_as(value).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("mean", mean)
    try:
        model = llama(num_key_value_heads=4)
        model.set_attn_implementation("mean")
        as_eager(Loss(model), tokens())
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["mean"]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_mask_is_made_where_none_was_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of transformers before 5.23 ask so, also where there is no mask to look at."""

    def older(find: Any) -> Any:
        def ignored(padding_mask: Any, *given: Any, **named: Any) -> bool:
            traced = masking_utils.is_tracing(padding_mask)
            return not traced and find(padding_mask, *given, **named)

        return ignored

    for each in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(masking_utils, each, older(getattr(masking_utils, each)))
    model, inputs = ZOO[name]()
    inputs = {key: value for key, value in inputs.items() if "mask" not in key}
    nodes = trace(model, (), inputs).graph.nodes
    masks = [node.args[3] for node in nodes if node.op == "autopar.sdpa.default"]
    assert masks and masks == [None] * len(masks)
