"""A step in microbatches, run as if its graphs were one forward and one backward.

The forward runs all turns, each forward and backward, and saves the gradients. Where they are known
to be in proportion to the gradient of the loss, the backward multiplies them by what comes in. So a
script calls `loss.backward()` as ever, or scales its loss before.

Where gradients may be in no proportion (a hook that clamps them, a loss of two outputs, float16, in
which a script scales its loss to keep small gradients apart from zero), the turns are done again if
another gradient comes in than they started from; the next call starts from that.
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
_NO_STATE = torch.empty(0, dtype=torch.uint8)

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
        self.tangents = tuple(program.tangent_dtypes)
        is_exact = program.is_proportional and not program.is_half
        self._scales = is_exact and len(self.tangents) == 1
        num_saved = len(program.backward_outputs) + len(self.tangents)
        if not self._scales:
            num_saved += 1 + len(self.forward_inputs)
        self.saved = tuple(f"saved:{k}" for k in range(num_saved))
        self._next: tuple[Tensor, ...] = ()
        """The gradients that the turns of the next call start from."""

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        """The results, then what is `saved`: the gradients, and of what; and where one does not
        follow from the other by a factor, all that it takes to do the turns again."""
        given = list(inputs)
        inputs.clear()
        tangents = self._next or self._first()
        state = DefaultRandom(self.device).now() if draws(self.program.forward) else _NO_STATE
        results, gradients = self._run(given, tangents, None)
        grads = [gradients[name] for name in self.program.backward_outputs]
        more = () if self._scales else (state, *given)
        return [*(results[name] for name in self.results), *grads, *tangents, *more]

    def backward(self, inputs: list[Any]) -> list[Tensor]:
        """The gradients, of what comes in behind what is saved."""
        num_grads, num = len(self.program.backward_outputs), len(self.tangents)
        grads, used = inputs[:num_grads], inputs[num_grads : num_grads + num]
        more, given = inputs[num_grads + num : -num], inputs[-num:]
        inputs.clear()
        if self._scales:
            return self._scaled(grads, used[0], given[0])
        if all(torch.equal(a, b) for a, b in zip(used, given, strict=True)):
            return grads
        grads.clear()
        self._next = tuple(tangent.detach().clone() for tangent in given)
        state, *values = more
        _, found = self._run(values, self._next, state)
        return [found[name] for name in self.program.backward_outputs]

    def _first(self) -> tuple[Tensor, ...]:
        """One for the first loss, zero for others, which are mostly looked at alone."""
        dtypes = (getattr(torch, name) for name in self.program.tangent_dtypes.values())
        return tuple(
            torch.full((), float(not k), dtype=dtype, device=self.device)
            for k, dtype in enumerate(dtypes)
        )

    def _run(
        self, inputs: Sequence[Any], tangents: Sequence[Tensor], state: Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All turns; drawing from `state` if they are done again."""
        given = dict(zip(self.forward_inputs, inputs, strict=True))
        arriving = dict(zip(self.tangents, tangents, strict=True))
        values = TensorValues(self.device)
        random = DefaultRandom(self.device)
        is_drawn = state is not None and state.numel() > 0
        with random.replayed(state) if state is not None and is_drawn else nullcontext():
            around = replaying(self.program, self.device)
            return run_turns(self.program, self.graphs, values, given, arriving, around)

    def _scaled(self, grads: list[Tensor], used: Tensor, given: Tensor) -> list[Tensor]:
        """Gradients in proportion to what came in. Two may be one tensor: none is changed."""
        ratio = given / used
        if not keeps_graph() and ratio.device.type == "cpu" and ratio.item() == 1:
            found = grads
        else:
            found = list[Tensor]()
            for k, grad in enumerate(grads):
                found.append(grad * ratio)
                grads[k] = found[k]
        return found


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
