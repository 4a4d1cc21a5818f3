"""What all ranks do together at the start of each call of a compiled model: they meet.

Each brings a few numbers: which program is to run, whether for gradients, and a digest of the
inputs that must be the same everywhere. They are gathered over a process group of their own, on the
host, before anything of the call is sent: a rank that was handed another batch, takes another
program or does not come is told before it can make a loss wrong or hang.

A rank that waits asks where the others are (`roll`). It gives up when those that have not come can
never come, since they have ended or stand still in other collectives; others may be slow, and have
the process group's timeout. What fails within a step is told in the same words.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.errors import PlanMismatchError, RankError
from autopar.runtime.process.agreement import Agreement
from autopar.runtime.process.digests import BATCH, BatchDigest
from autopar.runtime.process.roll import Roll, RollPlace, guilty, is_lost_peer
from autopar.runtime.process.rows import row_shapes
from autopar.runtime.process.spots import of_error, of_stack, script_line, waiting_collective
from autopar.runtime.process.waits import BoundedStore, SilenceError, in_time

PATIENCE_S = 1.0
"""How long a rank waits before it asks where the others are, and then again and again."""
SURE_S = 3.0
"""How long ranks stand still in other collectives before they are held to be stuck there."""
NEW = -1
"""The number of a program that is to be made."""

_TOGETHER = (
    "; every rank calls a compiled model at the same time with the same inputs, since each holds a "
    "part of it: make the call on all ranks, or enter `with model.unsharded(rank=0):` on all ranks "
    "and make it inside on that one alone"
)
_OWN_ROWS = (
    '; each rank passes rows of its own (inputs="local"), which may be of another number, but not '
    "of another shape or dtype: pad them to one length on all ranks (accelerate's "
    'pad_across_processes, or padding="max_length" of a tokenizer or collator)'
)
_FACTS = ("program", "gradients", "batch")
SLACK_S = 5.0
"""How much longer than torch's own timeout, whose words say more, a wait for torch may take."""
_Answer = TypeVar("_Answer")
_Graph = Callable[[list[Any]], Sequence[Any]]


class Meeting:
    """One rank's end of the meetings of all ranks. `group` is a process group of gloo for this
    alone."""

    def __init__(self, group: dist.ProcessGroup, store: BoundedStore, roll: Roll) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.roll = roll
        self._group, self.store = group, store
        self._digest = BatchDigest()
        rows = torch.zeros((self.size, len(_FACTS)), dtype=torch.int64, device="cpu")
        mine = torch.zeros(len(_FACTS), dtype=torch.int64, device="cpu")
        self._mine, self._rows = mine, list(rows.unbind())
        self._brought, self._gathered = mine.numpy(), rows.numpy()
        self._parted: RankError | None = None
        self._has_begun = False

    def exchange(self, numbers: Sequence[int]) -> Tensor:
        """What each rank brings to the call that `meet` starts, a row per rank: as many numbers
        on all of them. RankError as from `meet`."""
        self._has_begun = False  # A call before may have failed on its way to meet.
        self._begin()
        with self.roll.during("start"):
            return self._gather(numbers)

    def _gather(self, numbers: Sequence[int]) -> Tensor:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = torch.empty((self.size, len(numbers)), dtype=torch.int64, device="cpu")
        self._wait(self._group.allgather([list(rows.unbind())], [mine]))
        return rows

    def meet(
        self,
        program: int,
        batch: Sequence[Tensor],
        facts: Callable[[], Mapping[str, str]],
        own_rows: Sequence[Tensor] | None = None,
    ) -> list[list[int]]:
        """Return when all ranks are here with the same. `program` is the number of what they made
        together, or `NEW`, `batch` the inputs of which every rank has all, `facts` what else to
        compare where something differs.

        Of `own_rows` ranks may have other numbers, as where one needs a program that another does
        not, or all need one: then it returns how many each rank has, per tensor, and they are to
        put them together and to meet again without.

        PlanMismatchError, on every rank, names those that differ and in what; RankError those that
        cannot come.
        """
        self._begin()
        self._has_begun = False
        grad = torch.is_grad_enabled()
        self._brought[:] = program, grad, self._digest(batch)
        with self.roll.during("start"):
            self._wait(self._group.allgather([self._rows], [self._mine]))
            differs = bool((self._gathered != self._gathered[0]).any())
            if own_rows is not None and (differs or program == NEW):
                shapes = self._gather(row_shapes(own_rows))
                if (shapes[:, 0] != shapes[0, 0]).any():
                    what = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in own_rows)
                    self._compare({"rows of their own": what}, _OWN_ROWS)
                if (shapes != shapes[0]).any():
                    self._has_begun = True
                    return shapes[:, 1:].T[: len(own_rows)].tolist()
            if differs:
                self._compare(self._named(facts()), _TOGETHER)
        return []

    def _begin(self) -> None:
        if self._parted is not None:
            raise self._parted
        if not self._has_begun:
            self.roll.calls += 1
            self._has_begun = True

    def told(self, phase: str, gm: fx.GraphModule, graph: _Graph) -> _Graph:
        """`graph`, which runs `gm`, the local graph of `phase`: if a collective fails in it, the
        error says which it was, and where the other ranks are."""

        def run(inputs: list[Any]) -> Sequence[Any]:
            with self.roll.during(phase, gm):
                try:
                    return graph(inputs)
                except RuntimeError as error:
                    if not is_lost_peer(error):
                        raise
                    raise self._explained(error, phase, gm) from error

        return run

    @contextmanager
    def awaiting(self, phase: str, what: str) -> Generator[None]:
        """Inside, this rank is in `phase` of the call and waits for `what`: if a rank is lost, the
        error says so, and where the others are."""
        with self.roll.during(phase, waits_in=what):
            try:
                yield
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                where = f"the {phase} of call {self.roll.calls}, for {what}"
                raise self._lost(where, self.roll.call()) from error

    @contextmanager
    def working(self, phase: str) -> Generator[None]:
        """Inside, this rank is at work in `phase`, for which others wait as long as it takes: if a
        collective fails, the error says which it was, and where the other ranks are."""
        with self.roll.during(phase), self.roll.working():
            try:
                yield
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                raise self._explained(error, phase) from error

    def within(
        self, what: str, function: Callable[..., _Answer], *args: Any, **kwargs: Any
    ) -> _Answer:
        """What `function`, in which ranks wait for each other, returns: SilenceError if that takes
        longer than the process group's timeout. `what` it is for, to be told."""
        limit_s = self.store.timeout_s + SLACK_S
        with self.roll.during(self.roll.phase, waits_in=what):
            return in_time(limit_s, what, function, *args, **kwargs)

    def _explained(
        self, error: RuntimeError, phase: str, gm: fx.GraphModule | None = None
    ) -> RankError:
        """What to say of a peer that is lost, as `error` has it."""
        if isinstance(error, SilenceError):
            waited = error.awaited
        else:
            waited = waiting_collective(of_error(error), gm) or "a collective"
        call = f" of call {self.roll.calls}" if self.roll.calls else ""
        return self._lost(f"the {phase}{call}, in {waited}", self.roll.call())

    def _wait(self, work: Any) -> None:
        stuck: list[RollPlace] = []
        since = time.monotonic()
        while True:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=PATIENCE_S))
                return
            if work.is_completed():
                try:
                    work.wait()
                    return
                except RuntimeError as error:
                    raise self._lost(self._start(), self.roll.call()) from error
            places = self.roll.call()
            if work.is_completed():
                continue
            if any(place.ended for place in places):
                raise self._lost(self._start(), places, _TOGETHER)
            absent = [place for place in places if place.calls < self.roll.calls]
            if not _same(absent, stuck):
                stuck, since = absent, time.monotonic()
            elif absent and all(p.waits_in for p in absent) and time.monotonic() > since + SURE_S:
                raise self._lost(self._start(), absent, _TOGETHER)

    def _start(self) -> str:
        line = script_line(iter(of_stack(sys._getframe())))
        return f"the start of call {self.roll.calls}" + (f", at {line}" if line else "")

    def _lost(self, where: str, places: Sequence[RollPlace], hint: str = "") -> RankError:
        """What to tell of a wait in vain; from now on the ranks have parted."""
        # gloo cannot take back what is under way, and a group that is freed waits for it, which
        # would hold up the end of the process for as long as the group's timeout says.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        told = guilty(places)
        self._parted = RankError(f"rank {self.rank} waited in {where}, and {told}{hint}")
        return self._parted

    def _named(self, facts: Mapping[str, str]) -> dict[str, str]:
        """`facts`, and what this rank brought, in words."""
        named: dict[str, str] = dict(zip(_FACTS, map(str, self._brought), strict=True))
        named[BATCH] = named.pop("batch")
        named["program"] = "a new one" if self._brought[0] == NEW else named["program"]
        named["gradients"] = "on" if self._brought[1] else "off"
        return {**facts, **named}

    def _compare(self, facts: Mapping[str, str], remedy: str) -> None:
        """All ranks know that something differs: what it is, in words."""
        agreement = Agreement(self.store, self.roll, name=f"meeting/{self.roll.calls}")
        try:
            agreement.agree(f"call {self.roll.calls} of a compiled model", facts)
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{error}{remedy}") from None


def _same(some: Sequence[RollPlace], others: Sequence[RollPlace]) -> bool:
    """Whether ranks stand where they stood when the roll was called before."""
    before, after = ([msgspec.structs.replace(p, roll=0) for p in ps] for ps in (some, others))
    return before == after
