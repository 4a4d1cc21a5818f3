"""The compiled model's side of other libraries: saving, loading, accelerate, `isinstance`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import nn

from autopar.runtime.checkpoint.saving import save_alone, save_pretrained
from autopar.runtime.module.params import as_stored, check_ties
from autopar.runtime.process.moves import moves

_OF = "_autopar_forward_of"
"""The attribute of a forward, taken from a compiled model, that has the model."""


def _of_model(function: Any, compiled: nn.Module) -> Any:
    """`function` with the plain model in place of the compiled one, which a trace cannot see."""
    model: Any = compiled._model
    if isinstance(function, MethodType) and function.__self__ is compiled:
        return MethodType(function.__func__, model)
    if isinstance(function, partial):
        args = [model if x is compiled else x for x in function.args]
        named = {name: model if x is compiled else x for name, x in function.keywords.items()}
        return partial(_of_model(function.func, compiled), *args, **named)
    if getattr(function, _OF, None) is compiled:
        return inspect.unwrap(function, stop=lambda one: not hasattr(one, _OF))
    return function


def _drop_own(model: nn.Module) -> None:
    """Drop the model's own forward if it is that of its class."""
    function = vars(model).get("forward")
    if isinstance(function, MethodType) and function == MethodType(type(model).forward, model):
        del model.forward


@contextmanager
def _having(model: nn.Module, function: Any) -> Generator[None, None, None]:
    """Inside, calls of `model` go to `function`."""
    table = vars(model)
    before = table.get("forward")
    if model.forward == function:
        yield
        return
    table["forward"] = function
    _drop_own(model)
    try:
        yield
    finally:
        table.pop("forward", None)
        if before is not None:
            table["forward"] = before


class Facade(nn.Module):
    """A model that passes for the one it was made from: for `isinstance` and `inspect`, for
    accelerate, and for saving."""

    _model: nn.Module
    _runner: Any

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of the model, for `isinstance` and for class attributes; `type` gives
        `CompiledModule`."""
        return type(self._model)

    @property
    def forward(self) -> Callable[..., Any]:
        """A call, with the signature of the model's own forward, also after that is replaced.
        Inside of a call, it is the plain forward."""
        own = self._model.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._runner.runs_plain:
                return own(*args, **kwargs)
            with _having(self._model, own):
                return self._runner(args, kwargs)

        vars(forward)[_OF] = self
        return forward

    @forward.setter
    def forward(self, function: Callable[..., Any]) -> None:
        """The forward that calls run from now on, with the model's hooks around it, as on one
        device. The next call plans."""
        vars(self._model)["forward"] = _of_model(function, self)
        _drop_own(self._model)

    @forward.deleter
    def forward(self) -> None:
        """Calls go to the forward of the model's class again."""
        del self._model.forward

    @property
    def _is_accelerate_prepared(self) -> bool:
        """accelerate reads this before it prepares a model. True keeps it from moving the model,
        wrapping it or changing its forward; its terms hold from then on."""
        self._runner.accept_accelerate()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """accelerate marks models that it has prepared."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model. Its parameters are DTensors, to be saved by all ranks. For a model
        under accelerate they are whole, on any rank that calls it."""
        state = self._model.state_dict(*args, **kwargs)
        terms = self._runner.terms
        return terms.library.whole(state, kwargs.get("prefix", "")) if terms else state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """That of the model; each rank takes its shards of whole tensors. AutoparError if `assign`
        would make two parameters in one memory of a tied one."""
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
