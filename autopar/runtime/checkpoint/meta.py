"""Making a model that is too large for one device: its parameters on torch's meta device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_TWIN = "_autopar_meta"


@contextmanager
def on_meta() -> Generator[None, None, None]:
    """Inside, modules are made with their parameters on the meta device: shapes without values.

    `with autopar.on_meta(): model = MyModel()`. Unlike under `torch.device("meta")`, everything
    else has values, buffers above all, so that nothing that `__init__` computes is lost. Parameters
    get theirs from `autopar.compile(model, weights=...)` or `autopar.compile(model, seed=...)`.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        known = vars(param)
        if _TWIN not in known:
            made = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            vars(made).update(known)
            # For a second module that is given the same parameter: tied ones stay tied.
            known[_TWIN] = made
        return known[_TWIN]

    hook: Any = to_meta
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
