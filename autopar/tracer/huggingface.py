"""How to trace models of Hugging Face `transformers` as they are: without cache, with attention and
masks as in `sdpa`, and experts as one op."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from autopar.runtime.replacing import replaced
from autopar.tracer.attention import transformers_attention
from autopar.tracer.experts import TransformersExperts, looped

IMPLEMENTATION = "autopar"


@contextmanager
def prepared(model: nn.Module) -> Generator[None, None, None]:
    """Inside, `model` can be traced if it is or holds models of `transformers`. Afterwards it is as
    before."""
    outermost = _outermost(model)
    if not outermost:
        yield
        return
    configs = _configs(outermost)
    with (
        _without_a_look_at_padding(),
        _masks_where_eager_has_them(),
        _without_cache(outermost, configs),
        _attention_as_one_op(outermost, configs),
        _experts_as_one_op(outermost, configs),
    ):
        yield


def _without_a_look_at_padding() -> AbstractContextManager[None]:
    """Skip the search for padding in the inputs, of which `transformers` would only warn."""
    library = sys.modules["transformers.modeling_utils"].PreTrainedModel
    nothing: Any = lambda *_given, **_named: None  # noqa: E731
    return replaced((library, "warn_if_padding_and_no_attention_mask", nothing))


def _masks_where_eager_has_them() -> AbstractContextManager[None]:
    """Without a mask from the caller, make none, as in eager. Releases before 5.23 make one
    whenever a model is traced, and fused attention treats it as any mask."""
    from transformers import masking_utils

    library: Any = masking_utils
    is_tracing = library.is_tracing

    def is_some(tensor: Any = None) -> bool:
        return tensor is not None and is_tracing(tensor)

    return replaced((library, "is_tracing", is_some))


@contextmanager
def _experts_as_one_op(models: list[Any], configs: list[Any]) -> Generator[None, None, None]:
    library = sys.modules.get("transformers.integrations.moe")
    if library is None:
        yield
        return
    forwards = {m: looped(m) for model in models for m in model.modules()}
    loops = {module: forward for module, forward in forwards.items() if forward is not None}
    library.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, TransformersExperts(models))
    try:
        with replaced(*((c, "_experts_implementation", IMPLEMENTATION) for c in configs)):
            for module, forward in loops.items():
                module.forward = forward
            yield
    finally:
        for module in loops:
            del module.forward  # back to the class's
        library.ALL_EXPERTS_FUNCTIONS._global_mapping.pop(IMPLEMENTATION, None)


def _outermost(model: nn.Module) -> list[Any]:
    """The models of `transformers` in `model` that are in no other."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    outermost: list[Any] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, library.PreTrainedModel):
            outermost.append(module)
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return outermost


def _pretrained(models: list[Any]) -> Iterator[Any]:
    """`models` and the models in them."""
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return (m for model in models for m in model.modules() if isinstance(m, kind))


def _configs(models: list[Any]) -> list[Any]:
    """Every configuration that the modules of `models` read, each once, parents first."""
    library = sys.modules["transformers.configuration_utils"]
    configs: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if isinstance(config, library.PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            for name in config.sub_configs:
                visit(getattr(config, name, None))

    for model in models:
        for module in model.modules():
            visit(getattr(module, "config", None))
    return list(configs.values())


@contextmanager
def _attention_as_one_op(models: list[Any], configs: list[Any]) -> Generator[None, None, None]:
    """Make attention by sdpa, or by a kernel that needs a device, one op, with the masks that
    `transformers` makes for sdpa. Functions that are not the library's own are traced as they
    are."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    without_sdpa = {id(m.config) for m in _pretrained(models) if not m._supports_sdpa}

    def kind(config: Any) -> str | None:
        fallback = "eager" if id(config) in without_sdpa else "sdpa"
        own = config._attn_implementation
        return fallback if _is_kernel(functions, own) else own

    is_librarys = functions["sdpa"] is sdpa_attention_forward
    if is_librarys:
        functions["sdpa"] = transformers_attention(sdpa_attention_forward)
    try:
        # Setting a configuration's value sets its children's: parents first, so that each child
        # keeps its own.
        with replaced(*((config, "_attn_implementation", kind(config)) for config in configs)):
            yield
    finally:
        if is_librarys:
            del functions["sdpa"]  # the override of this process


def _is_kernel(functions: Any, kind: str | None) -> bool:
    """Whether attention `kind` is the library's own, other than sdpa: a kernel for a device."""
    if kind == "sdpa" or kind not in functions:
        return False
    function = functions[kind]
    return getattr(function, "func", function).__module__.startswith("transformers.")


@contextmanager
def _without_cache(models: list[Any], configs: list[Any]) -> Generator[None, None, None]:
    """Have no model make a cache, and none look for packed sequences unless eager does. Eager looks
    for them in the positions, if there is no cache. Positions that the caller did not give are not
    packed. But `transformers` cannot see that while it is traced, and would make a mask for every
    model."""
    from transformers import masking_utils

    caches = {id(config): config.use_cache for config in configs if hasattr(config, "use_cache")}
    packed = False

    def before_call(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal packed
        signature = inspect.signature(module.forward)
        given = {**signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        cached = given.get("use_cache")
        if cached is None:
            cached = caches.get(id(module.config), False)
            if "use_cache" in signature.parameters:
                kwargs = {**kwargs, "use_cache": False}
        # A model in training whose layers are checkpointed makes no cache.
        without_cache = not cached or any(
            each.training and getattr(each, "gradient_checkpointing", False)
            for each in _pretrained([module])
        )
        packed = given.get("position_ids") is not None and without_cache
        return args, kwargs

    find: Any = masking_utils.find_packed_sequence_indices
    handles = [m.register_forward_pre_hook(before_call, with_kwargs=True) for m in models]
    try:
        with replaced(
            (
                masking_utils,
                "find_packed_sequence_indices",
                lambda positions: find(positions) if packed else None,
            ),
            *((config, "use_cache", False) for config in configs if id(config) in caches),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()
