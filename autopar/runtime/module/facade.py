"""What other libraries ask of a model, and are told of a compiled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from torch import nn

from autopar.runtime.checkpoint.reading import moves
from autopar.runtime.checkpoint.saving import save_alone, save_pretrained
from autopar.runtime.module.params import as_stored, check_ties


class Facade(nn.Module):
    """A model that is seen as the one it was made from: by `isinstance` and `inspect`, by
    accelerate, and by those who save it."""

    _model: nn.Module
    _runner: Any

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the model, for `isinstance` and for what is asked of a class; `type` tells."""
        return type(self._model)

    @property
    def forward(self) -> Callable[..., Any]:
        """A call, with the signature of the model's own forward."""

        @wraps(self._model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._runner(args, kwargs)

        return forward

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What accelerate asks of a model that it is to prepare, before it moves it, wraps it or
        changes its forward: it is to do none of these, and its terms hold from then on."""
        self._runner.accept_accelerate()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """accelerate notes on what it has prepared that it has."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model. Its parameters are DTensors, to be saved by all ranks, but for a model
        that accelerate has: they are whole, on any rank that asks."""
        state = self._model.state_dict(*args, **kwargs)
        terms = self._runner.terms
        return terms.library.whole(state, kwargs.get("prefix", "")) if terms else state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """That of the model; of whole tensors, each rank takes what it stores. AutoparError if
        `assign` would leave tied parameters that are two in one memory."""
        assigned = kwargs.get("assign", args[1] if len(args) > 1 else False)
        if assigned and self._runner.world.size > 1:
            check_ties(self._model, state_dict)
        moves.begin()
        try:
            return self._model.load_state_dict(as_stored(self._model, state_dict), *args, **kwargs)
        finally:
            moves.end()

    @property
    def save_pretrained(self) -> Callable[..., None]:
        """That of a model of `transformers`, to be called by all ranks: rank 0 writes the files,
        with whole tensors, and `from_pretrained` reads them back. Of a model that accelerate has,
        rank 0 can do so alone. AttributeError for others."""
        if not hasattr(self._model, "save_pretrained"):
            raise AttributeError(f"{type(self._model).__name__} has no save_pretrained")
        if self._runner.terms is not None:
            return partial(save_alone, self._model, self._runner.world, self.state_dict)
        return partial(save_pretrained, self._model, self._runner.world)
