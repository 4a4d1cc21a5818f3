"""What `load_state_dict` would make of a checkpoint: hooks and methods of modules rename tensors
(`weight_norm`), put them together, or add some that older versions lacked.

They are run on tensors without values. What they hand on as it is keeps its place in the files, of
which a rank reads its shards; only what they compute is computed, of whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.checkpoint.lazy import Lazy, Region, Unreadable, everything
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
    it does not know, under their own. The model is left as it is."""
    blank: dict[str, Tensor] = {
        name: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
        for name, lazy in stored.items()
        if not isinstance(lazy, Unreadable)
    }
    found = _Loading().load(model, blank)
    names = {id(tensor): name for name, tensor in blank.items()}
    if any(id(tensor) not in names for tensor in found.values()):
        handed_on = set(map(id, found.values()))
        given = {
            name: tensor if id(tensor) in handed_on else stored[name].read(everything(tensor.shape))
            for name, tensor in blank.items()
        }
        found = _Loading().load(model, given)
    unreadable = {n: lazy for n, lazy in stored.items() if isinstance(lazy, Unreadable)}
    return unreadable | {
        name: stored[names[id(tensor)]] if id(tensor) in names else Computed(tensor.detach())
        for name, tensor in found.items()
    }


class _Loading:
    """Runs what modules do as they load, but for what all do: to copy values."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is there to load, by name, once all modules have changed a state dict."""
        with loading_by(self._take), torch.no_grad():
            self._walk(model, dict(state), "")
        return self._found

    def _walk(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        load_into(module, state, prefix)
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                own = {key: value for key, value in state.items() if key.startswith(inner)}
                self._walk(child, own, inner)

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        run_load_hooks(module, state, prefix, *more)
        children = module._modules
        for key, value in state.items():
            first, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and not (rest and first in children):
                self._found[key] = value
