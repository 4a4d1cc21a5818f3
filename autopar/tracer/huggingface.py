"""What models of Hugging Face `transformers` need in order to be traced as they are: no cache,
attention that does not build a mask where there is nothing to mask, and experts as one op."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.tracer.attention import transformers_attention
from autopar.tracer.experts import TransformersExperts

IMPLEMENTATION = "autopar"

# With these inputs alone, attention sees every position, or every earlier one.
_MASK_FREE_INPUTS = frozenset(
    {"input_ids", "inputs_embeds", "labels", "pixel_values", "decoder_input_ids"}
)
_NEEDS_MASK = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "position_bias")

_CHANGED = ("_attn_implementation", "_experts_implementation", "use_cache")


@contextmanager
def prepared(model: nn.Module) -> Generator[None, None, None]:
    """`model`, if it is or holds models of `transformers`, so that it can be traced; as it was
    afterwards."""
    outermost = _outermost(model)
    if not outermost:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs = _configs(outermost)
    before = [{k: getattr(c, k) for k in _CHANGED if hasattr(c, k)} for c in configs]
    handles = [m.register_forward_pre_hook(_before_call, with_kwargs=True) for m in outermost]
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, transformers_attention)
    try:
        for config in configs:
            if hasattr(config, "use_cache"):
                config.use_cache = False
        with _experts_as_one_op(outermost, configs):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for config, attributes in zip(configs, before, strict=True):
            for name, value in attributes.items():
                setattr(config, name, value)
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(IMPLEMENTATION, None)


@contextmanager
def _experts_as_one_op(models: list[Any], configs: list[Any]) -> Generator[None, None, None]:
    library = sys.modules.get("transformers.integrations.moe")
    if library is None:
        yield
        return
    library.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, TransformersExperts(models))
    try:
        for config in configs:
            config._experts_implementation = IMPLEMENTATION
        yield
    finally:
        library.ALL_EXPERTS_FUNCTIONS._global_mapping.pop(IMPLEMENTATION, None)


def _outermost(model: nn.Module) -> list[Any]:
    """The models of `transformers` in `model` that are in no other."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found: list[Any] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, library.PreTrainedModel):
            found.append(module)
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return found


def _configs(models: list[Any]) -> list[Any]:
    """Every configuration that the modules of `models` read, each once, parents first."""
    library = sys.modules["transformers.configuration_utils"]
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if isinstance(config, library.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                visit(getattr(config, name, None))

    for model in models:
        for module in model.modules():
            visit(getattr(module, "config", None))
    return list(found.values())


def _before_call(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = inspect.signature(module.forward)
    given = {
        k for k, v in signature.bind_partial(*args, **kwargs).arguments.items() if v is not None
    }
    given |= {k for k, v in kwargs.items() if v is not None}
    _choose_attention(module, given - {"args", "kwargs"})
    if "use_cache" in signature.parameters and "use_cache" not in given:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def _choose_attention(model: Any, given: set[str]) -> None:
    """Attention as one op without a mask where none is needed; with one, where the model asked
    for a fused kernel that needs a device."""
    current = model.config._attn_implementation
    if current in ("eager", None):
        return
    tensors = given - {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}
    plain = tensors <= _MASK_FREE_INPUTS and not any(map(_masks, _configs([model])))
    if plain and getattr(model, "_supports_attention_backend", False):
        model.config._attn_implementation = IMPLEMENTATION
    elif current != "sdpa":
        model.config._attn_implementation = "sdpa"


def _masks(config: Any) -> bool:
    """Whether a configuration asks for more than causal attention."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return bool(kinds) or any(getattr(config, name, None) for name in _NEEDS_MASK)
