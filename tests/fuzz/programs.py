"""A small model as a program: Python text that a person can read, run and keep as a regression."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(floats(*shape) / 2)


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(floats(*shape) / 2, requires_grad=False)


WORDS: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "floats": floats,
    "integers": integers,
    "param": param,
    "frozen": frozen,
}
"""What a program may speak of."""


@dataclass(frozen=True)
class Program:
    """`source` defines a class `Drawn` of modules, and a function `inputs` that makes the tuple of
    its arguments. With `through_all`, gradients go through all outputs, beside losses too."""

    source: str
    through_all: bool = False

    def __repr__(self) -> str:
        return f"\n{self.source}" + ("# through_all=True\n" if self.through_all else "")

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model and its inputs, the same every time."""
        file = f"<drawn {hash(self.source):x}>"
        # What is raised inside names the line.
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space = dict(WORDS)
        exec(compile(self.source, file, "exec"), space)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return space["Drawn"](), space["inputs"]()


def class_source(name: str, init: list[str], arguments: list[str], forward: list[str]) -> str:
    """The text of a module's class."""
    lines = [f"class {name}(nn.Module):"]
    if init:
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in init]
    lines += [f"    def forward({', '.join(['self', *arguments])}):"]
    lines += [f"        {line}" for line in forward]
    return "\n".join(lines) + "\n"
