"""Public models in small configurations, by library: each a function that returns a model and the
inputs of a call. `tests/zoo/table.py` puts them to the test."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

Build = Callable[[], tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]]

_OWN = "tests.zoo.public"
FILES = {
    "causal_lm": ("transformers", ("tests.zoo.every_causal_lm",)),
    "torch": ("torch", (f"{_OWN}.layers",)),
    "torchvision": ("torchvision", (f"{_OWN}.of_torchvision",)),
    "timm": ("timm", (f"{_OWN}.of_timm",)),
    "diffusers": ("diffusers", (f"{_OWN}.of_diffusers",)),
    "transformers": (
        "transformers",
        (f"{_OWN}.texts", f"{_OWN}.pairs", f"{_OWN}.pictures", f"{_OWN}.sounds"),
    ),
}
"""Per part of the table, the library it needs, and the files with MODELS of it."""


@cache
def entries() -> dict[str, Build | str]:
    """Every model under "part/name", in the order of the table; a part whose library is missing,
    or is not for the torch that is here, has the one entry "part/all": why there is no other."""
    found: dict[str, Build | str] = {}
    for part, (library, files) in FILES.items():
        try:
            import_module(library)
        except (ImportError, RuntimeError) as error:
            found[f"{part}/all"] = f"{error}: pip install -c constraints.txt '.[zoo]'"
            continue
        for file in files:
            models: dict[str, Build] = import_module(file).MODELS
            found |= {f"{part}/{name}": build for name, build in models.items()}
    return found
