"""Checkpoints whose tensors have other names and forms than the model's: hooks and `transformers`.

They are run on tensors without values. A tensor that they pass through keeps its place in the
files, of which a rank reads its shards. Only what they compute is computed, from whole tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import WeightsError
from autopar.runtime.checkpoint.lazy import (
    Joined,
    Lazy,
    Region,
    Stacked,
    Transposed,
    Unreadable,
    everything,
)
from autopar.runtime.torch_private import load_into, loading_by, run_load_hooks


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor in memory."""

    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self, place: Region) -> Tensor:
        return self.value[place].clone(memory_format=torch.contiguous_format)


def as_loaded(model: nn.Module, stored: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The tensors of a checkpoint under the names, and in the forms, that `model` loads; those that
    it does not know keep their names. The model is not changed."""
    blank: dict[str, Tensor] = {
        name: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
        for name, lazy in stored.items()
        if not isinstance(lazy, Unreadable)
    }
    loaded = _loaded(model, blank)
    names = {id(tensor): name for name, tensor in blank.items()}
    if any(id(tensor) not in names for tensor in loaded.values()):
        unchanged = set(map(id, loaded.values()))
        given = {
            name: tensor if id(tensor) in unchanged else stored[name].read(everything(tensor.shape))
            for name, tensor in blank.items()
        }
        loaded = _loaded(model, given)
    unreadable = {n: lazy for n, lazy in stored.items() if isinstance(lazy, Unreadable)}
    return unreadable | {
        name: stored[names[id(tensor)]] if id(tensor) in names else Computed(tensor.detach())
        for name, tensor in loaded.items()
    }


def _loaded(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict to load, once all modules have changed it. Runs the modules' own loading
    methods and hooks, without the copying of values that all share."""
    values: dict[str, Tensor] = {}

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        run_load_hooks(module, state, prefix, *more)
        for key, value in state.items():
            first, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and not (rest and first in module._modules):
                values[key] = value

    def walk(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        load_into(module, state, prefix)
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                walk(child, {key: x for key, x in state.items() if key.startswith(inner)}, inner)

    with loading_by(take), torch.no_grad():
        walk(model, dict(state), "")
    return values


# Checkpoints of `transformers`, whose tensors may have other names and forms than the model's.
#
# `save_pretrained` and the checkpoints of the hub keep old forms: without the prefix of the task's
# model, or one tensor per expert where the model has one for all. `transformers` describes how to
# get from one to the other; here that is done without reading. `tests/runtime/test_weights.py`
# checks the internals that this relies on.


def renamed_tensors(model: nn.Module, stored: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The tensors of a checkpoint under the names, and in the forms, that `model` has.

    WeightsError for a form that cannot be read shard by shard.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    state: Any = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix = str(model.base_model_prefix)
    tensors: dict[str, Lazy] = {}
    collected: dict[str, dict[str, list[Lazy]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            tensors[name] = stored[key]
        else:
            collected[name][pattern].append(stored[key])
    for name, parts in collected.items():
        shape = tuple(state[name].shape)
        tensors[name] = _converted(name, by_pattern[next(iter(parts))], parts, shape)
    return tensors


def ignorable(model: nn.Module, stored: Mapping[str, Lazy]) -> frozenset[str]:
    """The names in a checkpoint that the model declares ignorable."""
    patterns: list[str] = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    # Checkpoints of older versions store the frequencies of rotary embeddings in every layer.
    patterns.append(r"rotary_emb\.inv_freq$")
    return frozenset(key for key in stored if any(re.search(p, key) for p in patterns))


def _converted(
    name: str, converter: Any, parts: Mapping[str, list[Lazy]], shape: tuple[int, ...]
) -> Lazy:
    """One tensor from those that a converter takes, by its operations."""
    if len(converter.target_patterns) != 1:
        raise _unknown(name, converter.operations[0])
    held: dict[str, list[Lazy]] = {p: parts[p] for p in converter.source_patterns if p in parts}
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            held = {p: [Stacked(some, operation.dim)] for p, some in held.items()}
        elif kind == "Concatenate":
            every = [lazy for some in held.values() for lazy in some]
            held = {name: [Joined(every, operation.dim)]}
        elif kind == "Transpose" and all(len(some) == 1 for some in held.values()):
            for p, (lazy,) in held.items():
                if not operation.check_dims or lazy.shape != shape:
                    held[p] = [Transposed(lazy, operation.dim0, operation.dim1)]
        else:
            raise _unknown(name, operation)
    (result,) = (lazy for some in held.values() for lazy in some)
    return result


def _unknown(name: str, operation: Any) -> WeightsError:
    return WeightsError(
        f"the checkpoint stores {name} in a form ({type(operation).__name__}) that cannot be read "
        "in pieces: load it once with from_pretrained, and save it with "
        "save_pretrained(..., save_original_format=False)"
    )
