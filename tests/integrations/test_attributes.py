"""What Trainer and accelerate ask of a model, answered as by the model itself."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import can_return_loss, find_labels

import autopar
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.saving import Library
from autopar.runtime.module.accelerated import Terms, mixed_precision
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.process.world import World


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def test_a_compiled_model_shows_the_class_and_signature_of_the_model(
    model: GPT2LMHeadModel,
) -> None:
    compiled = autopar.compile(model)
    assert isinstance(compiled, PreTrainedModel) and isinstance(compiled, CompiledModule)
    assert type(compiled) is CompiledModule
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert find_labels(compiled.__class__) == ["labels"]
    assert can_return_loss(compiled.__class__) == can_return_loss(GPT2LMHeadModel)
    for name in ("config", "main_input_name", "loss_type", "_no_split_modules"):
        assert getattr(compiled, name) == getattr(model, name)
    assert compiled.can_generate() and not hasattr(compiled, "hf_device_map")
    ids = torch.zeros(1, 8, dtype=torch.long)
    compiled.eval()
    assert torch.equal(compiled.forward(input_ids=ids).logits, compiled(input_ids=ids).logits)


def test_without_an_accelerator_nothing_changes_hands(model: GPT2LMHeadModel) -> None:
    compiled = autopar.compile(model)
    compiled._is_accelerate_prepared = True
    assert compiled._is_accelerate_prepared
    assert compiled._runner.terms is None


def test_float16_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.state

    def state() -> SimpleNamespace:
        return SimpleNamespace(mixed_precision="fp16")

    monkeypatch.setattr(accelerate.state, "AcceleratorState", state)
    with pytest.raises(AutoparError, match='mixed_precision="bf16"'):
        mixed_precision()


def test_a_loss_by_the_number_of_items_is_shared_between_ranks(model: GPT2LMHeadModel) -> None:
    world = World(0, 1, torch.device("cpu"))
    library = Library(model, world)
    terms = Terms(model, World(0, 4, torch.device("cpu")), library, torch.bfloat16)
    loss, logits = torch.tensor(8.0), torch.ones(2, dtype=torch.bfloat16)
    given = {"num_items_in_batch": 3}
    assert terms.give({"loss": loss, "logits": logits}, {})["loss"] == 8.0
    assert terms.give({"loss": loss, "logits": logits}, given)["loss"] == 2.0
    assert terms.give((loss, logits), given)[0] == 2.0
    assert terms.give((loss, logits), given)[1].dtype == torch.float32
    alone = Terms(model, world, library, None)
    items = alone.take({"num_items_in_batch": 3})["num_items_in_batch"]
    assert isinstance(items, torch.Tensor) and items == 3.0
