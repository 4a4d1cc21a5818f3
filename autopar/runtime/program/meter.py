"""How long the graphs of a program run, and how long they wait for communication.

Measuring never waits. On a CPU the clock is read around each graph and each wait. On a GPU events
are recorded on the stream, and read on request. Waits are measured in graphs that are interpreted
on a CPU; those of inductor or of a GPU's streams are not known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import fx

from autopar.plans.run_record import MeasuredStep
from autopar.runtime.ops.ragged_all_to_all import RAGGED_OPS

_LAST = 64
"""The number of steps that are stored."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default

_Graph = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True)
class _Waits:
    """The waits of all graphs of this process, in nanoseconds of the clock."""

    since_ns: int = 0
    whole_ns: int = 0


_waits = _Waits()


def before_wait() -> None:
    """Stands before a wait in a graph."""
    _waits.since_ns = time.perf_counter_ns()


def after_wait() -> None:
    """Stands behind it."""
    _waits.whole_ns += time.perf_counter_ns() - _waits.since_ns


@dataclass(slots=True)
class _Pass:
    """One run of a graph: its start and end, and how long it waited."""

    start: Any
    end: Any
    waited_ns: int


@dataclass(slots=True)
class _Step:
    forward: _Pass
    backward: _Pass | None = None


@dataclass(slots=True)
class Meter:
    """Measures one program on `device`, but for its first step, which prepares the others."""

    device: torch.device
    counts_waits: bool = False
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_LAST))
    _is_warm: bool = False

    def count_waits(self, *graphs: fx.GraphModule) -> None:
        """From now on the waits of these graphs are measured. If ops wait inside of a graph, not
        all waits can be measured: then none are."""
        if self.device.type != "cpu" or any(
            node.target in RAGGED_OPS for gm in graphs for node in gm.graph.nodes
        ):
            return
        self.counts_waits = True
        for gm in graphs:
            for node in gm.graph.find_nodes(op="call_function", target=_WAIT):
                with gm.graph.inserting_before(node):
                    gm.graph.call_function(before_wait)
                with gm.graph.inserting_after(node):
                    gm.graph.call_function(after_wait)
            gm.recompile()

    def timed(self, phase: str, graph: _Graph) -> _Graph:
        """`graph`, which is the program's `phase` (forward or backward), measured."""

        def run(inputs: list[Any]) -> Sequence[Any]:
            start, before_ns = self._mark(), _waits.whole_ns
            outputs = graph(inputs)
            self._note(phase, _Pass(start, self._mark(), _waits.whole_ns - before_ns))
            return outputs

        return run

    @property
    def num_steps(self) -> int:
        """The number of stored steps that have a forward and a backward."""
        return len(self._whole())

    def measured(self) -> MeasuredStep | None:
        """The measured step; None before the second step is over. Waits for a GPU that still runs
        the last one."""
        steps = self._whole()
        if not steps:
            return None
        periods = [
            self._ns(first.forward.start, second.forward.start)
            for first, second in pairwise(self._steps)
            if first.backward and second.backward
        ]
        passes = [
            self._ns(each.start, each.end)
            for step in steps
            for each in (step.forward, step.backward)
        ]
        both = [sum(pair) for pair in zip(passes[::2], passes[1::2], strict=True)]
        waits = [step.forward.waited_ns + step.backward.waited_ns for step in steps]
        on_cuda = self.device.type == "cuda"
        return MeasuredStep(
            step_ns=round(median(periods)) if periods else None,
            passes_ns=max(1, round(median(both))),
            exposed_ns=round(median(waits)) if self.counts_waits else None,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if on_cuda else None,
        )

    def _whole(self) -> list[Any]:
        return [step for step in self._steps if step.backward]

    def _note(self, phase: str, done: _Pass) -> None:
        if phase == "forward":
            if self._is_warm:
                self._steps.append(_Step(done))
        elif not self._is_warm:
            self._is_warm = True
        elif self._steps and self._steps[-1].backward is None:
            self._steps[-1].backward = done

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _ns(self, start: Any, end: Any) -> float:
        if isinstance(start, int):
            return end - start
        end.synchronize()
        return start.elapsed_time(end) * 1e6
