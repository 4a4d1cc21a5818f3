"""The check of all ranks at the start of each call of a compiled model.

Each rank sends a few numbers: which program is to run, whether for gradients, and a digest of the
inputs that must be the same everywhere. They are gathered over a process group of their own, on the
host, before the call sends anything. So a rank with another batch or program, or one that does not
come, is an error, not a wrong loss or a hang.

A waiting rank asks where the others are (`rank_registry`). It gives up if missing ranks can never
come, since they have ended or are stuck in other collectives. Slow ranks have the process group's
timeout. Errors within a step have the same messages.
"""

from __future__ import annotations

import ctypes
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
from autopar.ir.grouping import grouped
from autopar.runtime.generators import Drawing
from autopar.runtime.process.agreement import Agreement, at_line
from autopar.runtime.process.beside import Beside
from autopar.runtime.process.brought import (
    ALL_CALL,
    APART,
    BESIDE,
    NEW,
    OPTIMIZER_STEP,
    OWN_ROWS,
    READ,
    ROWS,
    STEP,
    Brought,
    row_shapes,
)
from autopar.runtime.process.digests import BatchDigest
from autopar.runtime.process.rank_registry import RankLocation, RankRegistry, guilty, is_lost_peer
from autopar.runtime.process.stack_lines import of_error, waiting_collective
from autopar.runtime.process.waits import BoundedStore, SilenceError, in_time
from autopar.runtime.torch_private import collectives_begun

PATIENCE_S = 1.0
"""The interval at which a waiting rank asks where the others are."""
SURE_S = 3.0
"""How long ranks wait in other collectives before they count as stuck there."""
_READ_PATIENCE_S, _READ_SURE_S = 0.3, 0.5
"""The same for a rank that can also read alone."""
ALL, ALONE, FIRST = range(3)
"""Who reads: all ranks together, each rank alone, or this one alone before it joins the others."""
_GAVE_UP, _CAME = "alone", "all"
_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1
SLACK_S = 5.0
"""How much longer than torch's own timeout a wait for torch may take: torch's message says more."""
_Answer = TypeVar("_Answer")
_Graph = Callable[[list[Any]], Sequence[Any]]


class PreStepCheck:
    """One rank's end of the checks of all ranks. `group` is a gloo process group for this alone,
    `device` the rank's training device, and `name` the prefix of their keys in the Store."""

    def __init__(
        self, group: dist.ProcessGroup, store: BoundedStore, registry: RankRegistry,
        device: torch.device, name: str = "",
    ) -> None:  # fmt: skip
        self.rank, self.size = group.rank(), group.size()
        self.registry = registry
        self._group, self.store = group, store
        self._name = f"{name}/meeting"
        self._digest = BatchDigest()
        self._brought = Brought(self.size)
        self._parted: RankError | None = None
        self._has_begun = False
        self._num_gathered = 0
        self._left: list[Any] = []
        """Gathers for reads that this rank did not wait for."""
        self._others_wait: int | None = None
        """The number of collectives that this rank had begun when the others waited for it."""
        self.beside = Beside()
        self._drawing = Drawing(device)
        self._draws_alike = False
        """Whether all ranks have begun to draw from where rank 0 was."""
        self._reads = 0
        """A digest of the unchecked reads of all ranks since the previous call."""

    @property
    def has_parted(self) -> bool:
        """Whether a wait for another rank has failed."""
        return self._parted is not None

    def exchange(self, numbers: Sequence[int]) -> Tensor:
        """The `numbers` of each rank for the call that `meet` starts, a row per rank, equally many
        on all. RankError as from `meet`."""
        self._has_begun = False  # A call before may have failed on its way to meet.
        self._begin()
        with self.registry.during("start"):
            self._arrive("start", ROWS)
            return self._gather(numbers)

    def step(self) -> None:
        """Return once all ranks are at a step of an optimizer. PlanMismatchError or RankError if
        they are not: a step changes parameters, and one rank's alone must not change."""
        self._check()
        with self.registry.during(OPTIMIZER_STEP):
            self._arrive(OPTIMIZER_STEP, STEP)

    def reads(self, what: int, *, can_alone: bool) -> int:
        """ALL if all ranks are here to read the same, of which `what` is a digest. ALONE if any
        does something else, or waits in a collective of the script's own. If ranks are to read
        different things, the smallest group that can read alone is FIRST."""
        while self._parted is None and not (can_alone and self._others_wait == collectives_begun()):
            rows = self._rows_of_reading(what, can_alone=can_alone)
            if rows is None or any(row[0] != READ for row in rows):
                return ALONE
            groups = grouped((row[1], rank) for rank, row in enumerate(rows))
            if len(groups) == 1:
                if self._first_answer(_CAME) != _CAME:
                    return ALONE
                self._others_wait = None
                return ALL
            able = [group for group in groups.values() if all(rows[rank][2] for rank in group)]
            first = min(able, key=lambda group: (len(group), group), default=[self.rank])
            if self.rank in first:
                return FIRST
        return ALONE

    def _rows_of_reading(self, what: int, *, can_alone: bool) -> list[list[int]] | None:
        """The row of each rank; None if any rank cannot come."""
        brought = Brought(self.size)
        brought.mine[:3] = torch.tensor([READ, what, can_alone], device="cpu")
        self._num_gathered += 1
        try:
            work = self._group.allgather([brought.rows], [brought.mine])
        except RuntimeError:
            return None  # The script has ended the process groups.
        with self.registry.during(f"read {self._num_gathered}"):
            if self._come_to_read(work):
                return [row.tolist() for row in brought.rows]
        self._left = [left for left in self._left if not left[0].is_completed()]
        self._left.append((work, brought))
        self._others_wait = collectives_begun()
        return None

    def read_unasked(self, what: int) -> None:
        """Assume that all ranks take part in a read; the next check compares whether they did."""
        self._others_wait = None
        self._reads = (self._reads * _FACTOR + what) % _MODULUS

    def _come_to_read(self, work: Any) -> bool:
        stuck: list[RankLocation] = []
        since = time.monotonic()
        while True:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=_READ_PATIENCE_S))
                return True
            if work.is_completed():
                return False  # A rank is gone.
            absent = [place for place in self.registry.call() if place.phase != self.registry.phase]
            if not _same(absent, stuck):
                stuck, since = absent, time.monotonic()
            is_sure = time.monotonic() > since + _READ_SURE_S
            are_stuck = absent and is_sure and all(p.waits_in or p.ended for p in absent)
            if are_stuck and self._first_answer(_GAVE_UP) == _GAVE_UP:
                return False

    def _first_answer(self, answer: str) -> str:
        """The answer of the first rank that gave one on the last gather."""
        key = f"autopar/{self._name}/read/{self._num_gathered}"
        return self.store.compare_set(key, "", answer).decode()

    def _arrive(self, phase: str, *brought: int, drawn: tuple[int, int] = (0, 0)) -> None:
        """Gather the rows of all ranks, once ranks that read alone have gone on."""
        self._others_wait = None
        own, beside = self._brought, self.beside.taken(at_call=phase != OPTIMIZER_STEP)
        while True:
            own.bring(brought, self._reads, drawn, beside, self.registry.calls)
            self._num_gathered += 1
            self._wait(self._group.allgather([own.rows], [own.mine]), phase)
            if not own.is_read:
                break
        # Ranks that were elsewhere when a call failed have not counted it.
        self.registry.calls = own.calls
        if own.doing:
            self._compare("what comes next", {"next": f"{own.doing}{at_line()}"}, APART)
        # Differing reads are reported at the next call, which compares them.
        if own.has_read_alike:
            self._reads = 0
        if own.is_beside_other:
            self._compare(self._topic(), self.beside.describe(), BESIDE)

    def _gather(self, numbers: Sequence[int]) -> Tensor:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows = torch.empty((self.size, len(numbers)), dtype=torch.int64, device="cpu")
        self._wait(self._group.allgather([list(rows.unbind())], [mine]), "start")
        return rows

    def meet(
        self,
        program: int,
        batch: Sequence[Tensor],
        facts: Callable[[], Mapping[str, str]],
        own_rows: Sequence[Tensor] | None = None,
        *,
        draws_alike: bool = False,
    ) -> list[list[int]]:
        """Return once all ranks are here with the same. `program` is the number of the program, or
        `NEW`; `batch` are the global inputs; `facts` are compared too if something differs.

        Ranks may have different numbers of `own_rows`. If a program differs or must be made, it
        returns each rank's number of rows, per tensor. Ranks must then gather the rows and call
        `meet` again without.

        With `draws_alike`, all ranks go on from rank 0's random state: draws of a single rank are
        undone.

        PlanMismatchError, on every rank, names the ranks that differ, and in what; RankError names
        those that cannot come.
        """
        self._begin()
        self._has_begun = False
        digest = self._digest(batch)
        with self.registry.during("start"):
            is_drawing = draws_alike and self._draws_alike
            drawn = (self._drawing.seed, self._drawing.place) if is_drawing else (0, 0)
            self._arrive("start", program, torch.is_grad_enabled(), digest, drawn=drawn)
            remedy = self._brought.remedy
            if own_rows is not None and (remedy or program == NEW):
                shapes = self._gather(row_shapes(own_rows))
                if (shapes[:, 0] != shapes[0, 0]).any():
                    what = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in own_rows)
                    self._compare(self._topic(), {"rows of their own": what}, OWN_ROWS)
                if (shapes != shapes[0]).any():
                    self._has_begun = True
                    return shapes[:, 1:].T[: len(own_rows)].tolist()
            if remedy:
                self._compare(self._topic(), self._brought.named(facts()), remedy)
            if draws_alike and (not self._draws_alike or self._brought.has_drawn_other):
                self._take_states()
        return []

    def draw_alike(self) -> None:
        """From now on all ranks draw random numbers from rank 0's state. A collective call."""
        with self.registry.during("start"):
            self._arrive("start", ROWS)
            self._take_states()

    def _take_states(self) -> None:
        states = torch.frombuffer(bytearray(self._drawing.states()), dtype=torch.uint8)
        self._wait(self._group.broadcast(states, 0), "start")
        self._drawing.go_on(states.numpy().tobytes())
        self._draws_alike = True

    def _check(self) -> None:
        if self._parted is not None:
            raise self._parted

    def _begin(self) -> None:
        self._check()
        if not self._has_begun:
            self.registry.calls += 1
            self._has_begun = True

    def with_rank_errors(self, phase: str, gm: fx.GraphModule, graph: _Graph) -> _Graph:
        """`graph`, which runs `gm`, the local graph of `phase`: if a collective fails in it, the
        error says which it was, and where the other ranks are."""

        def explained(error: RuntimeError) -> RankError:
            return self._explained(error, phase, gm)

        def run(inputs: list[Any]) -> Sequence[Any]:
            with self.registry.during(phase, gm), _losses_are(explained):
                return graph(inputs)

        return run

    @contextmanager
    def awaiting(self, phase: str, what: str) -> Generator[None]:
        """Inside, this rank is in `phase` of the call and waits for `what`: if a rank is lost, the
        error says where the others are."""

        def lost(_: RuntimeError) -> RankError:
            where = f"the {phase} of call {self.registry.calls}, for {what}"
            return self._lost(where, self.registry.call())

        with self.registry.during(phase, waits_in=what), _losses_are(lost):
            yield

    @contextmanager
    def working(self, phase: str) -> Generator[None]:
        """Inside, this rank is at work in `phase`, for which others wait without a limit. If a
        collective fails, the error says which it was, and where the other ranks are."""
        with (
            self.registry.during(phase),
            self.registry.working(),
            _losses_are(lambda error: self._explained(error, phase)),
        ):
            yield

    def within(
        self, what: str, function: Callable[..., _Answer], *args: Any, **kwargs: Any
    ) -> _Answer:
        """The result of `function`, in which ranks wait for each other. SilenceError, for `what`,
        if that takes longer than the process group's timeout."""
        limit_s = self.store.timeout_s + SLACK_S
        with self.registry.during(self.registry.phase, waits_in=what):
            return in_time(limit_s, what, function, *args, **kwargs)

    def _explained(
        self, error: RuntimeError, phase: str, gm: fx.GraphModule | None = None
    ) -> RankError:
        """The error for a lost peer, by which `error` was raised."""
        waited = (
            error.awaited
            if isinstance(error, SilenceError)
            else waiting_collective(of_error(error), gm) or "a collective"
        )
        call = f" of call {self.registry.calls}" if self.registry.calls else ""
        return self._lost(f"the {phase}{call}, in {waited}", self.registry.call())

    def _wait(self, work: Any, phase: str) -> None:
        is_step = phase == OPTIMIZER_STEP
        stuck: list[RankLocation] = []
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
                    raise self._lost(self._start(phase), self.registry.call()) from error
            places = self.registry.call()
            if work.is_completed():
                continue
            if any(place.ended for place in places):
                raise self._lost(self._start(phase), places, ALL_CALL)
            calls = self.registry.calls
            absent = [p for p in places if p.calls < calls or (is_step and p.phase != phase)]
            if not _same(absent, stuck):
                stuck, since = absent, time.monotonic()
            elif absent and all(p.waits_in for p in absent) and time.monotonic() > since + SURE_S:
                raise self._lost(self._start(phase), absent, ALL_CALL)

    def _start(self, phase: str) -> str:
        return f"the {phase} of call {self.registry.calls}{at_line()}"

    def _topic(self) -> str:
        return f"call {self.registry.calls} of a compiled model"

    def _lost(self, where: str, places: Sequence[RankLocation], hint: str = "") -> RankError:
        """The error of a failed wait; from now on `has_parted` is true."""
        # gloo cannot cancel a collective, and a freed group waits for it. That would delay the end
        # of the process by the group's timeout.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._parted = RankError(f"rank {self.rank} waited in {where}, and {guilty(places)}{hint}")
        return self._parted

    def _compare(self, topic: str, facts: Mapping[str, str], remedy: str) -> None:
        """Raise the error that says what differs, once all ranks know that something does."""
        agreement = Agreement(self.store, self.registry, name=f"{self._name}/{self._num_gathered}")
        try:
            agreement.agree(topic, facts)
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{error}{remedy}") from None


@contextmanager
def _losses_are(rank_error: Callable[[RuntimeError], RankError]) -> Generator[None]:
    """Inside, an error that says that a rank is lost becomes the `rank_error` of it."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise rank_error(error) from error


def _same(some: Sequence[RankLocation], others: Sequence[RankLocation]) -> bool:
    """Whether ranks are where they were at the previous call of the rank registry."""
    before, after = ([msgspec.structs.replace(p, number=0) for p in ps] for ps in (some, others))
    return before == after
