"""Public models in small configurations, by library, as `tests/zoo/public_models.py` puts them to
the test: each a function that returns a model and the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any

from torch import nn

Build = Callable[[], tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]]

FILES = {
    "torch": ("layers",),
    "torchvision": ("of_torchvision",),
    "timm": ("of_timm",),
    "diffusers": ("of_diffusers",),
    "transformers": ("texts", "pairs", "pictures", "sounds"),
}
"""Per library, the files of this package that make models of it."""


@dataclass(frozen=True)
class Entry:
    """A row of the table; `build` is None where the library is not installed."""

    library: str
    name: str
    build: Build | None

    def __str__(self) -> str:
        return f"{self.library}/{self.name}"


def entries() -> list[Entry]:
    """Every model, in the order of the table; a library that is missing has one entry."""
    found: list[Entry] = []
    for library, files in FILES.items():
        if util.find_spec(library) is None:
            found.append(Entry(library, "all", None))
            continue
        for file in files:
            models: dict[str, Build] = import_module(f"{__name__}.{file}").MODELS
            found.extend(Entry(library, name, build) for name, build in models.items())
    return found
