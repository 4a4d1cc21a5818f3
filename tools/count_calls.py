"""Calls of a plan: climbs of the graph from `trace` to `price`, and the depth of the solver's door.

`python tools/count_calls.py` runs `autopar plan` on a small model, in one stage and in two, and
records its calls with a profile function. A run is more truthful than a reading of the source: most
calls on these ways are of functions that were handed in as arguments. The planner is deterministic,
so each run makes the same calls. What this model does not need is not seen: tight memory, chunks of
a loss, other schedules.

Named functions and methods of the package count. Closures, lambdas, comprehensions and generator
expressions do not: what they call is called by the named function below them on the stack. So a
decorator's wrapper is no call.

**Climbs.** A function takes the graph if an argument is a `Graph`, has one in a field, or in a
field of a field, or is a list of such. The graph's way is the list of the functions that take it,
in the order of their first calls. It begins when `trace` returns and ends when `price` first
returns, which is for one mesh. Methods of `Graph` are not on it: they are looks at the graph.

A stay is a longest run of the way in one module. A climb is a stay in a higher layer of the import
contracts than the stay before it. Returns are not on the way: to come back to a caller is no climb.
A climb is of one of two kinds:

    fetched    the caller is not in a lower layer than the function: it takes the graph to a low
               module first, and then to a higher one
    called up  the caller is in a lower layer: the function was handed in

Each function counts once, so loops and the size of the model change nothing.

**Depth.** How many calls are on the stack from `autopar plan`, or from `planning.answer`, to
`autopar.solver.solve`, that of `solve` included: the least and the most, over all calls of `solve`.

With `--check` only the figures are printed, and one above its limit in `LIMITS` is an error.
"""

from __future__ import annotations

import io
import sys
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

LIMITS = {
    "1": {
        "climbs until price returns": 38,
        "climbs until price is called": 14,
        "climbs that are called up": 1,
        "shallowest from answer": 6,
        "deepest from answer": 6,
        "shallowest from autopar plan": 10,
        "deepest from autopar plan": 10,
    },
    "2": {
        "climbs until price returns": 42,
        "climbs until price is called": 15,
        "climbs that are called up": 1,
        "shallowest from answer": 7,
        "deepest from answer": 9,
        "shallowest from autopar plan": 11,
        "deepest from autopar plan": 13,
    },
}
"""By the number of stages, what the figures may be at the most. Lower them with the figures."""

AIMS = {
    "1": {"climbs until price returns": 15, "deepest from answer": 6},
    "2": {"climbs until price returns": 15, "deepest from answer": 9},
}

ARGUMENTS = {"1": ("--stages", "1"), "2": ("--stages", "2", "--microbatches", "4")}
"""What is asked for, by the number of stages."""


def build() -> tuple[Any, Any]:
    """The model that is planned, which takes seconds: four layers and a loss."""
    import torch
    from torch import nn

    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    return Model(), (torch.randn(16, 32),)


class Function(NamedTuple):
    """A function of the package: its module without `autopar.` in front, and its name there."""

    module: str
    name: str


COMMAND, ANSWER = Function("cli.plan", "plan"), Function("driver.planning", "answer")
TRACE, PRICE = Function("tracer", "trace"), Function("cost_model.price", "price")
SOLVE = Function("solver.driver", "solve")


class Layers:
    """The layers of the import contracts, by container: of each member how high it is."""

    def __init__(self, pyproject: str) -> None:
        self._heights: dict[str, int] = {}
        for contract in tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]:
            for container in contract.get("containers", ()):
                for height, row in enumerate(reversed(contract["layers"])):
                    names = (name.strip().strip("()") for name in row.split("|"))
                    self._heights |= {f"{container}.{name}": height for name in names}

    def is_above(self, one: str, other: str) -> bool:
        """Whether module `one` lies in a higher layer than `other` where their names part: of two
        rooms, or of two modules in a room. A room's own `__init__` is above what is in it."""
        first, second = f"autopar.{one}".split("."), f"autopar.{other}".split(".")
        for end in range(2, min(len(first), len(second)) + 1):
            here, there = ".".join(first[:end]), ".".join(second[:end])
            if here != there:
                return self._heights[here] > self._heights[there]
        return len(first) < len(second)


class Step(NamedTuple):
    """A function that takes the graph, and who calls it."""

    function: Function
    caller: Function


class Climb(NamedTuple):
    """A stay above the one before it, which is in module `left`, begins with `reached`."""

    left: str
    reached: Function
    is_called_up: bool


@dataclass(slots=True)
class Calls:
    """What calls are made: the graph's way, and the stacks at the solver's door from the command
    on."""

    way: list[Step] = field(default_factory=list[Step])
    stacks: set[tuple[Function, ...]] = field(default_factory=set[tuple[Function, ...]])

    @property
    def to_door(self) -> list[Step]:
        """The way until `price` is called."""
        return self.way[: [step.function for step in self.way].index(PRICE) + 1]

    def depths(self, start: Function) -> tuple[tuple[Function, ...], tuple[Function, ...]]:
        """The shallowest and the deepest stack from `start` on."""
        found = sorted({s[s.index(start) :] for s in self.stacks}, key=lambda s: (len(s), s))
        return found[0], found[-1]


def stays(way: Sequence[Step]) -> list[list[Step]]:
    """The longest runs of a way in one module."""
    return [list(steps) for _, steps in groupby(way, key=lambda step: step.function.module)]


def climbs(way: Sequence[Step], layers: Layers) -> list[Climb]:
    """The stays of a way that are above the one before."""
    found: list[Climb] = []
    for before, after in pairwise(stays(way)):
        left, (reached, caller) = before[0].function.module, after[0]
        if layers.is_above(reached.module, left):
            found.append(Climb(left, reached, layers.is_above(reached.module, caller.module)))
    return found


class _Recorder:
    """A profile function that fills `calls`. It sees the calls of one thread."""

    def __init__(self, package: Path, graph: type) -> None:
        self.calls = Calls()
        self._package, self._graph = package, graph
        self._known: dict[int, tuple[CodeType, Function | None]] = {}
        self._seen: set[Function] = set()
        self._is_on_way, self._is_traced = False, False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        function = self._function(frame)
        if function is None:
            return
        if event == "return":
            if function == TRACE and not self._is_traced:
                self._is_on_way = self._is_traced = True
            elif function == PRICE:
                self._is_on_way = False
            return
        if function == SOLVE:
            stack = self._stack(frame)
            self.calls.stacks.add(stack[stack.index(COMMAND) :])
        is_new = self._is_on_way and function not in self._seen
        if is_new and not _is_look(function) and self._takes_graph(frame):
            self._seen.add(function)
            self.calls.way.append(Step(function, self._stack(frame)[-2]))

    def _function(self, frame: FrameType) -> Function | None:
        """That of a frame; None if it has no name, or is not of the package."""
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            # The code is held so that no other has its id.
            known = self._known[id(code)] = code, self._function_of(code)
        return known[1]

    def _function_of(self, code: CodeType) -> Function | None:
        path = Path(code.co_filename)
        if "<" in code.co_qualname or not path.is_relative_to(self._package):
            return None
        parts = path.relative_to(self._package).with_suffix("").parts
        return Function(".".join(parts).removesuffix(".__init__"), code.co_qualname)

    def _stack(self, frame: FrameType | None) -> tuple[Function, ...]:
        """The named functions up to a frame, the outermost first."""
        found: list[Function] = []
        while frame is not None:
            function = self._function(frame)
            if function is not None:
                found.append(function)
            frame = frame.f_back
        return tuple(reversed(found))

    def _takes_graph(self, frame: FrameType) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(self._has_graph(frame.f_locals.get(name), 2) for name in names)

    def _has_graph(self, value: object, depth: int) -> bool:
        """Whether a value is a graph, or has one in fields of fields to such a `depth`."""
        if isinstance(value, self._graph):
            return True
        if isinstance(value, list | tuple):
            return bool(value) and self._has_graph(value[0], depth)
        kind = type(value)
        if not depth or not kind.__module__.startswith("autopar."):
            return False
        slots = (name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
        names = (*slots, *getattr(value, "__dict__", ()))
        return any(self._has_graph(getattr(value, name, None), depth - 1) for name in names)


def _is_look(function: Function) -> bool:
    return function.module == "ir.graph" and function.name.startswith("Graph.")


def recorded(arguments: Sequence[str]) -> Calls:
    """The calls that `autopar plan` makes with such `arguments`."""
    import autopar
    from autopar.cli.plan import plan
    from autopar.ir.graph import Graph

    recorder = _Recorder(Path(autopar.__file__).parent, Graph)
    target = [f"{Path(__file__)}:{build.__name__}", "--cluster", "4xH100"]
    # What the command imports late is not to be recorded.
    import_module("autopar.driver.api")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sys.setprofile(recorder)
        try:
            plan.main([*target, *arguments], standalone_mode=False)
        finally:
            sys.setprofile(None)
    return recorder.calls


def figures(calls: Calls, layers: Layers) -> dict[str, int]:
    """What is held to limits."""
    found = climbs(calls.way, layers)
    figures = {
        "climbs until price returns": len(found),
        "climbs until price is called": len(climbs(calls.to_door, layers)),
        "climbs that are called up": sum(line_search.is_called_up for line_search in found),
    }
    for name, start in (("answer", ANSWER), ("autopar plan", COMMAND)):
        shallowest, deepest = calls.depths(start)
        figures[f"shallowest from {name}"] = len(shallowest) - 1
        figures[f"deepest from {name}"] = len(deepest) - 1
    return figures


def _print_all(calls: Calls, layers: Layers) -> None:
    before = climbs(calls.to_door, layers)
    inside = climbs(calls.way, layers)[len(before) :]
    for what, part in (("before price is called", before), ("in price", inside)):
        print(f"\nclimbs {what}:")
        rows: dict[tuple[str, str, bool], list[str]] = {}
        for left, reached, is_called_up in part:
            rows.setdefault((left, reached.module, is_called_up), []).append(reached.name)
        for (left, module, is_called_up), names in rows.items():
            kind = "called up" if is_called_up else "fetched"
            print(f"{len(names):4}  {left:26} -> {module:26} {kind:10} {', '.join(names)}")
    numbers = len(stays(calls.to_door)), len(stays(calls.way))
    print("\nstays: {} until price is called, {} until it returns".format(*numbers))
    for text, chain in zip(("shallowest", "deepest"), calls.depths(COMMAND), strict=True):
        print(f"\nthe {text} stack at the solver's door:")
        for depth, (module, name) in enumerate(chain):
            print(f"{depth:4}  autopar/{module.replace('.', '/')}.py  {name}")


def main(arguments: Sequence[str]) -> None:
    """Print the figures, and unless it is to `--check` them the climbs and stacks as well."""
    layers = Layers((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    is_check, is_over = "--check" in arguments, False
    for stages, given in ARGUMENTS.items():
        calls = recorded(given)
        print(f"{stages} stage{'s' * (stages != '1')}")
        for name, figure in figures(calls, layers).items():
            limit, aim = LIMITS[stages][name], AIMS[stages].get(name)
            is_over |= figure > limit
            told = f"  aim {aim}" if aim else ""
            if figure != limit:
                told += f"  {'above' if figure > limit else 'lower'} its limit {limit}"
            print(f"  {name:30} {figure:4}{told}")
        if not is_check:
            _print_all(calls, layers)
            print()
    sys.exit(is_check and is_over)


if __name__ == "__main__":
    main(sys.argv[1:])
