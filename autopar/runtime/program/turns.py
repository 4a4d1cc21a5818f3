"""A step in microbatches, run as if its graphs were one forward and one backward.

The forward runs all turns, each forward and backward, and saves the gradients of the loss; the
backward multiplies them by the gradient that comes in, to which they are proportional. So a script
calls `loss.backward()` as ever, or scales its loss before. Turns start from the gradient that came
in last time: where a script scales its loss so that small gradients stay apart from zero, they are
scaled inside the turns too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.program.program import Program, Sum
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.torch_private import keeps_graph

TURN = "turn:"
_CPU = torch.device("cpu")

Graphs = Mapping[tuple[bool, str], Callable[[list[Any]], Sequence[Any]]]
"""What runs the graph of a phase, in the last turn (True) or one before."""


class Values(Protocol):
    """How the values of a step are handled, be they tensors or lists of them, one per rank."""

    def zeros(self, found: Sum) -> Any:
        """What a sum starts from, or memory for rows."""
        ...

    def turn(self, number: int) -> Any:
        """The number of a turn as its graphs take it."""
        ...

    def put(self, rows: Any, turn: int, piece: Any) -> None:
        """Enter the rows of a turn."""
        ...


class TensorValues:
    """Those of one rank, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, found: Sum) -> Tensor:
        dtype: torch.dtype = getattr(torch, found.dtype)
        make = torch.empty if found.is_collected else torch.zeros
        return make(found.shape, dtype=dtype, device=self.device)

    def turn(self, number: int) -> Tensor:
        return torch.tensor([number], device=self.device)

    def put(self, rows: Tensor, turn: int, piece: Tensor) -> None:
        rows[:, turn] = piece.reshape(rows.shape[0], rows.shape[2])


def run_turns(
    program: Program,
    graphs: Graphs,
    values: Values,
    given: Mapping[str, Any],
    tangents: Mapping[str, Any],
    around: Callable[[bool], AbstractContextManager[None]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results, gradients), by their names in `program`, of what is `given` by name, where the
    losses have the gradients `tangents`. Each turn is run inside `around`, which is told whether it
    is the last."""
    sums = {found.name: values.zeros(found) for found in program.sums}
    collected = {found.name for found in program.sums if found.is_collected}
    results: dict[str, Any] = {}
    gradients: dict[str, Any] = {}

    def take(name: str, here: dict[str, Any]) -> Any:
        if name in sums:
            return sums[name] if name in collected else sums.pop(name)
        return here.pop(name) if name.startswith("saved:") else here[name]

    for turn in range(program.turns):
        is_last = turn == program.turns - 1
        part = program if is_last else program.before
        assert part is not None
        here: dict[str, Any] = {**given, **tangents, TURN: values.turn(turn)}
        phases = [("forward", part.forward_inputs, part.forward_outputs)]
        if part.backward is not None:
            phases.append(("backward", part.backward_inputs, part.backward_outputs))
        with around(is_last):
            for phase, names, outputs in phases:
                found = graphs[is_last, phase]([take(name, here) for name in names])
                for name, value in zip(outputs, found, strict=True):
                    if name in collected:
                        values.put(sums[name], turn, value)
                    else:
                        kind = name.partition(":")[0]
                        place = {"saved": here, "sum": sums, "grad": gradients}
                        place.get(kind, results)[name] = value
                del found
    return results, gradients


class Turns:
    """The forward and backward of a program in microbatches, on one rank."""

    def __init__(self, program: Program, graphs: Graphs, device: torch.device) -> None:
        self.program, self.graphs, self.device = program, graphs, device
        parts = (program, program.before)
        names = (name for part in parts if part is not None for name in part.forward_inputs)
        own = {TURN, *(found.name for found in program.sums)}
        self.forward_inputs = tuple(name for name in dict.fromkeys(names) if name not in own)
        kinds = (name.partition(":")[0] for name in program.forward_outputs)
        pairs = zip(program.forward_outputs, kinds, strict=True)
        self.results = tuple(name for name, kind in pairs if kind != "saved")
        self.saved = tuple(f"saved:{k}" for k in range(len(program.backward_outputs) + 1))
        self._tangents: dict[str, Tensor] = {}

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        """The results, then what is `saved`: the gradients, and what they are in proportion to."""
        given = dict(zip(self.forward_inputs, inputs, strict=True))
        inputs.clear()
        for name, dtype in self.program.tangent_dtypes.items():
            if name not in self._tangents:
                one = torch.ones((), dtype=getattr(torch, dtype), device=self.device)
                self._tangents[name] = one
        values, around = TensorValues(self.device), replaying(self.program, self.device)
        results, gradients = run_turns(
            self.program, self.graphs, values, given, self._tangents, around
        )
        grads = (gradients[name] for name in self.program.backward_outputs)
        return [*(results[name] for name in self.results), *grads, *self._tangents.values()]

    def backward(self, inputs: list[Any]) -> list[Tensor]:
        """The gradients, of what comes in behind what is saved."""
        *grads, used, tangent = inputs
        inputs.clear()
        self._tangents = {name: _usable(tangent.detach().clone()) for name in self._tangents}
        ratio = tangent / used
        if keeps_graph():
            return [grad * ratio for grad in grads]
        if ratio.device.type == "cpu" and ratio.item() == 1:
            return grads
        return [grad.mul_(ratio) for grad in grads]


def replaying(
    program: Program, device: torch.device = _CPU
) -> Callable[[bool], AbstractContextManager[None]]:
    """What is around each turn, so that what is drawn of random numbers for the whole batch is the
    same in all: the generator of `device` starts from where it is now."""
    if not draws(program.forward):
        return lambda _: nullcontext()
    random = DefaultRandom(device)
    state = random.now()
    return lambda is_last: nullcontext() if is_last else random.replayed(state)


def _usable(tangent: Tensor) -> Tensor:
    """A gradient that others can be in proportion to: neither zero nor infinite."""
    is_usable = torch.isfinite(tangent) & (tangent != 0)
    return torch.where(is_usable, tangent, torch.ones_like(tangent))
