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
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.program.program import TURN_INPUT, Program, Sum
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.torch_private import keeps_graph

_NO_STATE = torch.empty(0, dtype=torch.uint8)
Around = Callable[[bool], AbstractContextManager[None]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})

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


class TurnRun:
    """A step in turns as it is run, of what is `given` by name, where the losses have the gradients
    `tangents`; without them there is no backward. Each graph is run inside `around`, which is told
    whether the turn is the last. A phase's turns are run in order.

    `results` and `gradients` are those so far, by their names in `program`.
    """

    def __init__(
        self,
        program: Program,
        graphs: Graphs,
        values: Values,
        given: Mapping[str, Any],
        tangents: Mapping[str, Any] | None,
        around: Around,
    ) -> None:
        self.program, self.graphs, self.values, self.around = program, graphs, values, around
        self.given = {**given, **(tangents or {})}
        self.has_backward = program.backward is not None and tangents is not None
        needed = [s for s in program.sums if tangents is not None or s.phase == "forward"]
        self.sums = {found.name: values.zeros(found) for found in needed}
        self.collected = {found.name for found in needed if found.is_collected}
        self.results: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        """What the turns have saved whose backward is to come."""

    def forward(self, turn: int, received: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
        """The forward of a turn, with what other stages have sent; what they are sent."""
        self._saved[turn] = {}
        return self._run("forward", turn, received)

    def backward(self, turn: int, received: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
        """The backward of a turn, likewise."""
        sent = self._run("backward", turn, received)
        del self._saved[turn]
        return sent

    def _run(self, phase: str, turn: int, received: Mapping[str, Any]) -> dict[str, Any]:
        is_last = turn == self.program.turns - 1
        part = self.program if is_last else self.program.before
        assert part is not None
        names, outputs = part.names(phase)
        here = {**self.given, **received, TURN_INPUT: self.values.turn(turn)}
        saved = self._saved[turn]
        with self.around(is_last):
            found = self.graphs[is_last, phase]([self._take(name, here, saved) for name in names])
        sent: dict[str, Any] = {}
        places = {"saved": saved, "sum": self.sums, "grad": self.gradients, "sent": sent}
        for name, value in zip(outputs, found, strict=True):
            if name in self.collected:
                self.values.put(self.sums[name], turn, value)
            else:
                places.get(name.partition(":")[0], self.results)[name] = value
        return sent

    def _take(self, name: str, here: dict[str, Any], saved: dict[str, Any]) -> Any:
        """An input of a graph; what is not read again is not held here either."""
        if name in self.sums:
            return self.sums[name] if name in self.collected else self.sums.pop(name)
        kind = name.partition(":")[0]
        if kind == "saved":
            return saved.pop(name)
        return here.pop(name) if kind == "received" else here[name]


def run_turns(run: TurnRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results, gradients) of all turns, one after the other."""
    for turn in range(run.program.turns):
        run.forward(turn)
        if run.has_backward:
            run.backward(turn)
    return run.results, run.gradients


class Turns:
    """The forward and backward of a program in microbatches, on one rank."""

    def __init__(self, program: Program, graphs: Graphs, device: torch.device) -> None:
        self.program, self.graphs, self.device = program, graphs, device
        names = (name for part in program.parts for name in part.forward_inputs)
        own = {TURN_INPUT, *(found.name for found in program.sums)}
        self.forward_inputs = tuple(name for name in dict.fromkeys(names) if name not in own)
        kinds = (name.partition(":")[0] for name in program.forward_outputs)
        pairs = zip(program.forward_outputs, kinds, strict=True)
        self.results = tuple(name for name, kind in pairs if kind != "saved")
        self.tangents = tuple(program.tangent_dtypes)
        self._scales = program.is_proportional and len(self.tangents) == 1
        self._draws = draws(program.forward)
        num_saved = len(program.backward_outputs)
        if not self._scales:
            num_saved += len(self.tangents) + 1 + len(self.forward_inputs)
        self.saved = tuple(f"saved:{k}" for k in range(num_saved))
        self._next: tuple[Tensor, ...] = ()
        """The gradients that the turns of the next call start from."""

    def inference(self, inputs: list[Any]) -> list[Tensor]:
        """The results alone."""
        given = list(inputs)
        inputs.clear()
        results, _ = self._run(given, None, nullcontext())
        return [results[name] for name in self.results]

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        """The results, then what is `saved`: the gradients; and where they do not follow from those
        of another gradient of the loss by a factor, what of, and all that it takes to do the turns
        again."""
        given = list(inputs)
        inputs.clear()
        tangents = self._next or self._first()
        state = DefaultRandom(self.device).now() if self._draws else _NO_STATE
        results, gradients = self._run(given, tangents, nullcontext())
        grads = [gradients[name] for name in self.program.backward_outputs]
        more = () if self._scales else (*tangents, state, *given)
        return [*(results[name] for name in self.results), *grads, *more]

    def backward(self, inputs: list[Any]) -> list[Tensor]:
        """The gradients, of what comes in behind what is saved."""
        num_grads, num = len(self.program.backward_outputs), len(self.tangents)
        grads, more, given = inputs[:num_grads], inputs[num_grads:-num], inputs[-num:]
        inputs.clear()
        if self._scales:
            return _scaled(grads, given[0])
        used, state, values = more[:num], more[num], more[num + 1 :]
        if all(torch.equal(a, b) for a, b in zip(used, given, strict=True)):
            return [grad.clone() for grad in grads] if keeps_graph() else grads
        grads.clear()
        self._next = tuple(tangent.detach().clone() for tangent in given)
        again = DefaultRandom(self.device).replayed(state) if self._draws else nullcontext()
        _, found = self._run(values, self._next, again)
        return [found[name] for name in self.program.backward_outputs]

    def _first(self) -> tuple[Tensor, ...]:
        """One for the first loss, zero for others, which are mostly looked at alone."""
        dtypes = (getattr(torch, name) for name in self.program.tangent_dtypes.values())
        return tuple(
            torch.full((), float(not k), dtype=dtype, device=self.device)
            for k, dtype in enumerate(dtypes)
        )

    def _run(
        self,
        inputs: Sequence[Any],
        tangents: Sequence[Tensor] | None,
        outside: AbstractContextManager[None],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All turns, inside `outside`."""
        given = dict(zip(self.forward_inputs, inputs, strict=True))
        arriving = None if tangents is None else dict(zip(self.tangents, tangents, strict=True))
        values = TensorValues(self.device)
        with outside:
            around = replaying(DefaultRandom(self.device)) if self._draws else at_once
            run = TurnRun(self.program, self.graphs, values, given, arriving, around)
            return run_turns(run)


def _scaled(grads: list[Tensor], given: Tensor) -> list[Tensor]:
    """Gradients of a loss whose own is `given`, from those of one whose own is 1."""
    if not keeps_graph() and given.device.type == "cpu" and given.item() == 1:
        return grads
    found = list[Tensor]()
    factors = {device: given.to(device) for device in {grad.device for grad in grads}}
    for k, grad in enumerate(grads):
        found.append(grad * factors[grad.device])
        grads[k] = found[k]
    return found


def replaying(random: DefaultRandom) -> Around:
    """What is around each turn, so that what is drawn of random numbers for the whole batch is the
    same in all: `random` starts from where it is now."""
    state = random.now()
    return lambda is_last: nullcontext() if is_last else random.replayed(state)


def at_once(_: bool) -> AbstractContextManager[None]:
    """What is around each turn where nothing is drawn."""
    return nullcontext()
