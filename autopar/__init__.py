"""autopar: an auto-parallelizing compiler for PyTorch.

`import autopar` is quick and free of torch: what it exports is imported at first use. `compile` and
`plan` are functions here, though modules bear the same names; code that wants the modules says
`from autopar.compile import ...`, `from autopar.plan import ...`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.compile import compile, plan
    from autopar.cost_model.measured import profile
    from autopar.plan import Plan
    from autopar.runtime.data import dataloader
    from autopar.runtime.meta import on_meta
    from autopar.tracer.experts import experts
    from autopar.verify import verify

_EXPORTS = {
    "compile": "autopar.compile",
    "plan": "autopar.compile",
    "Plan": "autopar.plan",
    "verify": "autopar.verify",
    "profile": "autopar.cost_model.measured",
    "dataloader": "autopar.runtime.data",
    "on_meta": "autopar.runtime.meta",
    "experts": "autopar.tracer.experts",
}

__all__ = [
    "Plan",
    "__version__",
    "compile",
    "dataloader",
    "experts",
    "on_meta",
    "plan",
    "profile",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


class _Package(ModuleType):
    """Importing `autopar.plan` binds that module to the package as `plan`, over the function of
    this name; this class leaves exported names alone."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
