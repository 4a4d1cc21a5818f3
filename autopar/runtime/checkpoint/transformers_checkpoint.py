"""Checkpoints of `transformers`, whose tensors may have other names and forms than the model's.

`save_pretrained` and the checkpoints of the hub keep old forms: without the prefix of the task's
model, or one tensor per expert where the model has one for all. `transformers` describes how to get
from one to the other; here that is done without reading. `tests/runtime/test_weights.py` holds what
is relied on of its internals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.errors import WeightsError
from autopar.runtime.checkpoint.lazy import Joined, Lazy, Stacked, Transposed


def renamed_tensors(model: nn.Module, stored: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The tensors of a checkpoint under the names, and in the forms, that `model` has.

    WeightsError for a form that cannot be taken piece by piece.
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
    found: dict[str, Lazy] = {}
    collected: dict[str, dict[str, list[Lazy]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            found[name] = stored[key]
        else:
            collected[name][pattern].append(stored[key])
    for name, parts in collected.items():
        converter = by_pattern[next(iter(parts))]
        found[name] = _converted(name, converter, parts, tuple(state[name].shape))
    return found


def ignorable(model: nn.Module, stored: Mapping[str, Lazy]) -> frozenset[str]:
    """The names that the model says a checkpoint may have in vain, of those of a checkpoint."""
    patterns: list[str] = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    # Checkpoints of older versions store the frequencies of rotary embeddings in every layer.
    patterns.append(r"rotary_emb\.inv_freq$")
    return frozenset(key for key in stored if any(re.search(p, key) for p in patterns))


def _converted(
    name: str, converter: Any, parts: Mapping[str, list[Lazy]], shape: tuple[int, ...]
) -> Lazy:
    """One tensor from those that a converter takes, as its operations say."""
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
