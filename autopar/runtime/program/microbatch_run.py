"""A step in microbatches, run as if its graphs were one forward and one backward.

The forward runs all microbatches, each forward and backward, and saves the gradients. If these are
known to be in proportion to the gradient of the loss, the backward multiplies them by that. So a
script calls `loss.backward()` as ever, or scales its loss before.

Gradients may be in no proportion: with a hook that clamps them, a loss of two outputs, or float16,
for which a script scales its loss against underflow. Then microbatches run again if the incoming
gradient differs from the one they started from. The next call starts from the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.program.program import MICROBATCH_INPUT, WEIGHTS, Program, Sum
from autopar.runtime.program.random import DefaultRandom, draws
from autopar.runtime.torch_private import keeps_graph

_NO_STATE = torch.empty(0, dtype=torch.uint8)
Around = Callable[[bool], AbstractContextManager[None]]

Graphs = Mapping[tuple[bool, str], Callable[[list[Any]], Sequence[Any]]]
"""The function that runs the graph of a phase, in the last microbatch (True) or one before."""


class Values(Protocol):
    """How the values of a step are handled, be they tensors or lists of them, one per rank."""

    def zeros(self, total: Sum) -> Any:
        """The initial value of a sum, or memory for rows."""
        ...

    def microbatch(self, number: int) -> Any:
        """The number of a microbatch as an input of its graphs."""
        ...

    def put(self, rows: Any, microbatch: int, shard: Any) -> None:
        """Store the rows of a microbatch."""
        ...


class TensorValues:
    """The values of one rank, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, total: Sum) -> Tensor:
        dtype: torch.dtype = getattr(torch, total.dtype)
        make = torch.empty if total.is_collected else torch.zeros
        return make(total.shape, dtype=dtype, device=self.device)

    def microbatch(self, number: int) -> Tensor:
        return _number(number, self.device)

    def put(self, rows: Tensor, microbatch: int, shard: Tensor) -> None:
        rows[:, microbatch] = shard.reshape(rows.shape[0], rows.shape[2])


@cache
def _number(number: int, device: torch.device) -> Tensor:
    """Cached: a copy to a GPU would make the host wait."""
    with torch.inference_mode(False):
        return torch.tensor([number], device=device)


class MicrobatchRun:
    """A run of a step in microbatches. `given` are its inputs by name, and `tangents` the gradients
    of the losses; without them there is no backward. Each graph runs inside `around`, whose
    argument is whether the microbatch is the last. Microbatches go forward and backward in any
    order, of which `last_microbatches` are the last in forward and in backward.

    `results` and `gradients` are the ones computed so far, by their names in `program`.
    """

    def __init__(
        self,
        program: Program,
        graphs: Graphs,
        values: Values,
        given: Mapping[str, Any],
        tangents: Mapping[str, Any] | None,
        around: Around,
        last_microbatches: tuple[int, int] | None = None,
    ) -> None:
        self.program, self.graphs, self.values, self.around = program, graphs, values, around
        self.last_microbatches = last_microbatches or (
            program.microbatches - 1,
            program.microbatches - 1,
        )
        self.given = {**given, **(tangents or {})}
        self.has_backward = program.backward is not None and tangents is not None
        needed = [s for s in program.sums if tangents is not None or s.phase == "forward"]
        self.sums = {total.name: values.zeros(total) for total in needed}
        self.collected = {total.name for total in needed if total.is_collected}
        self.results: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.saved: dict[int, dict[str, Any]] = {}
        """The tensors saved by microbatches whose backward is to come."""

    def forward(self, microbatch: int, received: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the forward of a microbatch with the tensors `received` from other stages, which are
        released once they are read. Returns the tensors to send."""
        self.saved[microbatch] = {}
        sent = self._run("forward", microbatch, received)
        if not self.has_backward:
            del self.saved[microbatch]
        return sent

    def backward(self, microbatch: int, received: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the backward of a microbatch, or its first part, likewise. If all of it is for the
        whole batch, only the last microbatch has one."""
        part = self._part("backward", microbatch)
        sent = {} if part.backward is None else self._run("backward", microbatch, received)
        if part.weights is None:
            del self.saved[microbatch]
        return sent

    def weights(self, microbatch: int) -> None:
        """Run the second part of the backward of a microbatch, if it has one."""
        if self._part(WEIGHTS, microbatch).weights is not None:
            self._run(WEIGHTS, microbatch, None)
            del self.saved[microbatch]

    def _is_last(self, phase: str, microbatch: int) -> bool:
        """Whether a microbatch is the last one in a phase."""
        return microbatch == self.last_microbatches[phase != "forward"]

    def _part(self, phase: str, microbatch: int) -> Program:
        """The program of a microbatch in a phase."""
        part = self.program if self._is_last(phase, microbatch) else self.program.before
        assert part is not None
        return part

    def _run(self, phase: str, microbatch: int, received: dict[str, Any] | None) -> dict[str, Any]:
        is_last = self._is_last(phase, microbatch)
        names, outputs = self._part(phase, microbatch).names(phase)
        self.given[MICROBATCH_INPUT] = self.values.microbatch(microbatch)
        received, saved = received or {}, self.saved[microbatch]
        taken = [self._take(name, received, saved) for name in names]
        received.clear()
        with self.around(is_last):
            computed = self.graphs[is_last, phase](taken)
        sent: dict[str, Any] = {}
        places = {"saved": saved, "sum": self.sums, "grad": self.gradients, "sent": sent}
        for name, value in zip(outputs, computed, strict=True):
            if name in self.collected:
                self.values.put(self.sums[name], microbatch, value)
            else:
                places.get(name.partition(":")[0], self.results)[name] = value
        return sent

    def _take(self, name: str, received: dict[str, Any], saved: dict[str, Any]) -> Any:
        """An input of a graph; it is released here if it is not read again."""
        if name in self.sums:
            return self.sums[name] if name in self.collected else self.sums.pop(name)
        if name in self.given:
            return self.given[name]
        return saved.pop(name) if name.startswith("saved:") else received.pop(name)


def run_microbatches(run: MicrobatchRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results, gradients) of all microbatches, run one after the other."""
    for microbatch in range(run.program.microbatches):
        run.forward(microbatch)
        if run.has_backward:
            run.backward(microbatch)
    return run.results, run.gradients


RunAll = Callable[
    [Mapping[str, Any], Mapping[str, Any] | None], tuple[dict[str, Any], dict[str, Any]]
]
"""Runs all microbatches. Takes inputs by name and the gradients of the losses, if there are any;
returns the results and the gradients of parameters by their names."""


@dataclass(frozen=True, slots=True)
class MicrobatchNames:
    """The inputs, results, gradients and tangents of a step in microbatches on one rank, by their
    names in `Program`. `draws` says whether it draws random numbers. If it `is_proportional`, its
    gradients are known to be in proportion to that of the loss."""

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    tangent_dtypes: Mapping[str, str]
    is_proportional: bool
    draws: bool

    @staticmethod
    def of(program: Program) -> MicrobatchNames:
        """Those of a program in microbatches."""
        names = (name for part in program.parts for name in part.forward_inputs)
        own = {MICROBATCH_INPUT, *(total.name for total in program.sums)}
        return MicrobatchNames(
            tuple(name for name in dict.fromkeys(names) if name not in own),
            tuple(n for n in program.forward_outputs if not n.startswith("saved:")),
            program.backward_outputs,
            program.tangent_dtypes,
            program.is_proportional,
            draws(program.forward),
        )


def microbatch_runner(program: Program, graphs: Graphs, device: torch.device) -> RunAll:
    """The function that runs a program in microbatches on one rank."""
    is_random = draws(program.forward)

    def run(
        given: Mapping[str, Any], tangents: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        around = replaying(DefaultRandom(device)) if is_random else at_once
        return run_microbatches(
            MicrobatchRun(program, graphs, TensorValues(device), given, tangents, around)
        )

    return run


class MicrobatchedStep:
    """The forward and backward of a step in microbatches, on one rank, which `run` runs."""

    def __init__(self, names: MicrobatchNames, run: RunAll, device: torch.device) -> None:
        self.names, self.run, self.device = names, run, device
        self.tangents = tuple(names.tangent_dtypes)
        self._scales = names.is_proportional and len(self.tangents) == 1
        num_saved = len(names.gradients)
        if not self._scales:
            num_saved += len(self.tangents) + 1 + len(names.inputs)
        self.saved = tuple(f"saved:{k}" for k in range(num_saved))
        self._next: tuple[Tensor, ...] = ()
        """The gradients that the microbatches of the next call start from."""

    def inference(self, inputs: list[Any]) -> list[Tensor]:
        """The results alone."""
        given = list(inputs)
        inputs.clear()
        results, _ = self._run(given, None)
        return [results[name] for name in self.names.results]

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        """The results, then the `saved` tensors, which are the gradients. If these are not known to
        be in proportion, their tangents, the random state and the inputs follow: microbatches can
        run again with them."""
        given = list(inputs)
        inputs.clear()
        tangents = self._next or self._first()
        state = DefaultRandom(self.device).now() if self.names.draws else _NO_STATE
        results, gradients = self._run(given, tangents)
        grads = [gradients[name] for name in self.names.gradients]
        more = () if self._scales else (*tangents, state, *given)
        return [*(results[name] for name in self.names.results), *grads, *more]

    def backward(self, inputs: list[Any]) -> list[Tensor]:
        """The gradients, from the saved tensors and the tangents behind them."""
        num_grads, num = len(self.names.gradients), len(self.tangents)
        grads, more, given = inputs[:num_grads], inputs[num_grads:-num], inputs[-num:]
        inputs.clear()
        if self._scales:
            return _scaled(grads, given[0])
        used, state, values = more[:num], more[num], more[num + 1 :]
        if all(torch.equal(a, b) for a, b in zip(used, given, strict=True)):
            return [grad.clone() for grad in grads] if keeps_graph() else grads
        grads.clear()
        self._next = tuple(tangent.detach().clone() for tangent in given)
        random = DefaultRandom(self.device)
        with random.replayed(state) if self.names.draws else nullcontext():
            _, gradients = self._run(values, self._next)
        return [gradients[name] for name in self.names.gradients]

    def _first(self) -> tuple[Tensor, ...]:
        """One for the first loss, zero for others, which are rarely differentiated."""
        dtypes = (getattr(torch, name) for name in self.names.tangent_dtypes.values())
        return tuple(
            torch.full((), float(not k), dtype=dtype, device=self.device)
            for k, dtype in enumerate(dtypes)
        )

    def _run(
        self, inputs: Sequence[Any], tangents: Sequence[Tensor] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        given = dict(zip(self.names.inputs, inputs, strict=True))
        return self.run(
            given, None if tangents is None else dict(zip(self.tangents, tangents, strict=True))
        )


def _scaled(grads: list[Tensor], given: Tensor) -> list[Tensor]:
    """Gradients for a gradient `given` of the loss, from those for 1."""
    if not keeps_graph() and given.device.type == "cpu" and given.item() == 1:
        return grads
    scaled = list[Tensor]()
    factors = {device: given.to(device) for device in {grad.device for grad in grads}}
    for k, grad in enumerate(grads):
        scaled.append(grad * factors[grad.device])
        grads[k] = scaled[k]
    return scaled


def replaying(random: DefaultRandom) -> Around:
    """The context of each microbatch, in which `random` starts from its state now, so that all draw
    the same random numbers for the whole batch."""
    state = random.now()
    return lambda is_last: nullcontext() if is_last else random.replayed(state)


def at_once(_: bool) -> AbstractContextManager[None]:
    """The context of each microbatch if nothing is drawn."""
    return nullcontext()
