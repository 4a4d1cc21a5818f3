"""A model while it is drawn: every line is run as it is written, so that shapes and magnitudes are
known of every value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fuzz.programs import WORDS, Program, class_source

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = (4, 6, 2, 3, 8, 5, 12, 7, 9)
MAX_NUMEL = 1500
TAME = 30.0
"""Values grow no larger than this: what is compared keeps its digits."""


class Drawing:
    """`value` names stand for tensors; `lines` is the body of forward so far."""

    def __init__(self, draw: Draw, palette: Sequence[int], scope: str = "") -> None:
        self.draw = draw
        self.palette = palette
        self.scope = scope
        self.init: list[str] = []
        self.inputs: dict[str, str] = {}
        self.lines: list[str] = []
        self.blocks: list[str] = []
        self.used: set[str] = set()
        self.env: dict[str, Any] = {**WORDS, "self": nn.Module()}
        self._count = 0

    # What is drawn

    def pick(self, options: Sequence[T]) -> T:
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def size(self) -> int:
        return self.pick(self.palette)

    def dim(self, name: str) -> int:
        return self.number(0, self[name].dim() - 1)

    def some_dims(self, name: str) -> list[int]:
        """One dim or more."""
        rank = self[name].dim()
        return sorted(self.draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank)))

    def draw_order(self, items: Sequence[T]) -> list[T]:
        return list(self.draw(st.permutations(list(items))))

    # What is there

    def __getitem__(self, name: str) -> Tensor:
        return self.env[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.env[name].shape)

    def names(self, accept: Callable[[Tensor], bool]) -> list[str]:
        """Values for which `accept` holds, the latest first."""
        values = [k for k in self.env if k[0] in "vx" and k[1:].isdigit()]
        return [k for k in reversed(values) if accept(self.env[k])]

    def value(self, low: int = 0, high: int = 4, accept: Callable[[Tensor], bool] | None = None):
        """A float value of `low` to `high` dims that `accept` likes; a new one if there is none."""

        def fits(x: Tensor) -> bool:
            ranked = x.is_floating_point() and low <= x.dim() <= high
            return ranked and (accept is None or accept(x))

        found = self.names(fits)
        if not found:
            if accept is not None:
                return None
            return self.source(*(self.size() for _ in range(max(low, min(high, 2)))))
        name = self.pick(found)
        self.used.add(name)
        return name

    # What is written

    def fresh(self, letter: str = "v") -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def run(self, line: str) -> None:
        """A further line of forward."""
        exec(line, self.env)
        self.lines.append(line)

    def emit(self, expression: str) -> str:
        """A further value. Large ones are made small."""
        name = self.fresh()
        self.run(f"{name} = {expression}")
        value = self.env[name]
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            largest = value.detach().abs().max().item()
            if largest > TAME:
                self.run(f"{name} = {name} / {largest / 2:.0f}")
        return name

    def source(self, *shape: int) -> str:
        """An input or a parameter as a value."""
        if self.scope or self.chance(40):
            return self.emit(f"{self.parameter(*shape)} * 1")
        name = self.fresh("x")
        self.inputs[name] = f"floats({', '.join(map(str, shape))})"
        self.env[name] = eval(self.inputs[name], WORDS)
        self.used.add(name)
        return name

    def integers(self, high: int, *shape: int) -> str:
        """Integers below `high`: an input, maybe one that is there."""
        found = self.names(lambda x: x.dtype == torch.int64 and x.shape == shape)
        found = [name for name in found if int(self[name].max()) < high]
        if found and self.chance(60):
            return self.pick(found)
        if self.scope:
            return self.emit(f"torch.arange({prod(shape)}).reshape({list(shape)}) % {high}")
        name = self.fresh("x")
        self.inputs[name] = f"integers({', '.join(map(str, (high, *shape)))})"
        self.env[name] = eval(self.inputs[name], WORDS)
        return name

    def parameter(self, *shape: int) -> str:
        """A parameter: new, one that is there, or a further name for one that is there."""
        held = dict(self.env["self"].named_parameters(recurse=False, remove_duplicate=False))
        alike = [f"self.{name}" for name, p in held.items() if p.shape == shape]
        turned = [f"self.{name}.t()" for name, p in held.items() if p.shape == shape[::-1]]
        turned = turned if len(shape) == 2 else []
        if alike and self.chance(35):
            if self.chance(50):
                return self.pick(alike)
            return self.state(f"self.{self.fresh('p')} = {self.pick(alike)}")
        if turned and self.chance(50):
            return self.pick(turned)
        kind = "frozen" if self.chance(12) else "param"
        return self.state(f"self.{self.fresh('p')} = {kind}({', '.join(map(str, shape))})")

    def buffer(self, *shape: int) -> str:
        name = self.fresh("b")
        made = f"floats({', '.join(map(str, shape))})"
        return self.state(f'self.register_buffer("{name}", {made})', f"self.{name}")

    def state(self, line: str, name: str = "") -> str:
        exec(line, self.env)
        self.init.append(line)
        return name or line.partition(" = ")[0]

    def operand(self, name: str) -> str:
        """Something that can be broadcast with a value without making it larger."""
        shape = self.shape(name)

        def fits(x: Tensor) -> bool:
            lead = len(shape) - x.dim()
            return lead >= 0 and all(
                a in (1, b) for a, b in zip(x.shape, shape[lead:], strict=True)
            )

        found = self.value(accept=fits) if self.chance(65) else None
        if found is not None:
            return found
        kept = shape[self.number(0, len(shape)) :]
        return self.parameter(*(1 if self.chance(20) else size for size in kept))

    def small(self, name: str) -> bool:
        return self[name].numel() <= MAX_NUMEL

    # What comes of it

    def block(self, name: str, body: Callable[[Drawing], None], calls: int) -> None:
        """`calls` layers of one class, one after the other on a value, or one layer so often."""
        label = f"Block{len(self.blocks)}"
        inner = Drawing(self.draw, self.palette, scope=label)
        inner.env["v0"] = self[name].detach()
        body(inner)
        last = inner.names(lambda x: x.is_floating_point() and x.shape == self[name].shape)[0]
        rest = [k for k in inner.unused() if k not in (last, "v0")]
        total = " + ".join(
            ["v0", *([last] if last != "v0" else []), *(f"{k}.mean()" for k in rest)]
        )
        source = class_source(label, inner.init, ["v0"], [*inner.lines, f"return {total}"])
        self.blocks += [*inner.blocks, source]
        for text in (*inner.blocks, source):
            exec(text, self.env)
        shared = self.chance(25)
        attribute = f"self.{self.fresh('m')}"
        made = 1 if shared else calls
        self.state(f"{attribute} = nn.ModuleList({label}() for _ in range({made}))")
        for k in range(calls):
            name = self.emit(f"{attribute}[{0 if shared else k}]({name})")
            self.used.add(name)
        self.used.discard(name)

    def unused(self) -> list[str]:
        """Float values that nothing was computed from."""
        return [k for k in self.names(Tensor.is_floating_point) if k not in self.used]

    def program(self, returned: str) -> Program:
        lines = [*self.lines, f"return {returned}"]
        drawn = class_source("Drawn", self.init, list(self.inputs), lines)
        made = ", ".join(self.inputs.values())
        inputs = f"def inputs():\n    return ({made}{',' if self.inputs else ''})\n"
        return Program("\n".join([*self.blocks, drawn, inputs]))
