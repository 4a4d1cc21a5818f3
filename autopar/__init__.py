"""autopar: an auto-parallelizing compiler for PyTorch.

`import autopar` is quick and free of torch: what it exports is imported at first use. `compile` is
a function here, though a module bears the same name, that of the flow; code that wants the module
says `from autopar.compile import ...`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from autopar.ir.version import __version__
from autopar.plans.display import show_with

if TYPE_CHECKING:
    from autopar.driver.api import compile, frontier, plan
    from autopar.driver.training.reporting import run_report
    from autopar.driver.verify import verify
    from autopar.plans.frontier import Frontier
    from autopar.plans.plan import Plan
    from autopar.plans.requests.plan_options import (
        ConstraintOptions,
        MemoryOptions,
        OutputOptions,
        PipelineOptions,
        SearchOptions,
    )
    from autopar.runtime.checkpoint.initialise import on_meta
    from autopar.runtime.measuring.measure import profile
    from autopar.runtime.process.data import dataloader
    from autopar.tracer.experts import experts

_EXPORTS = {
    "compile": "autopar.driver.api",
    "plan": "autopar.driver.api",
    "frontier": "autopar.driver.api",
    "Frontier": "autopar.plans.frontier",
    "Plan": "autopar.plans.plan",
    "ConstraintOptions": "autopar.plans.requests.plan_options",
    "MemoryOptions": "autopar.plans.requests.plan_options",
    "OutputOptions": "autopar.plans.requests.plan_options",
    "PipelineOptions": "autopar.plans.requests.plan_options",
    "SearchOptions": "autopar.plans.requests.plan_options",
    "verify": "autopar.driver.verify",
    "profile": "autopar.runtime.measuring.measure",
    "run_report": "autopar.driver.training.reporting",
    "dataloader": "autopar.runtime.process.data",
    "on_meta": "autopar.runtime.checkpoint.initialise",
    "experts": "autopar.tracer.experts",
}

_RENAMED = {"report": "run_report"}
"""Exports by the names that they have for one more release."""

__all__ = [
    "ConstraintOptions",
    "Frontier",
    "MemoryOptions",
    "OutputOptions",
    "PipelineOptions",
    "Plan",
    "SearchOptions",
    "__version__",
    "compile",
    "dataloader",
    "experts",
    "frontier",
    "on_meta",
    "plan",
    "profile",
    "run_report",
    "verify",
]

show_with(lambda: importlib.import_module("autopar.driver.pages"))


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        text = f"autopar.{name} is called autopar.{_RENAMED[name]}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _EXPORTS:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


class _Package(ModuleType):
    """Importing `autopar.compile` binds that module to the package as `compile`, over the function
    of this name; this class leaves exported names alone."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in (*_EXPORTS, *_RENAMED) and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
