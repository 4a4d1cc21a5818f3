"""The incumbent of a search: the best of what was tried, what nothing that was tried beats, and why
there was none where there was none. Every search of the driver is one, over meshes, microbatches,
chunks of the loss, segments or pipelines; one that stands within another is an attempt of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.errors import InfeasibleError, StageError, UnsuitedMeshError
from autopar.ir.units import format_ns
from autopar.plans.memory_refinement import Beaten, Candidate
from autopar.plans.provenance import CandidateOutcome, OutcomeKind
from autopar.plans.requests.request import PlanRequest

_T = TypeVar("_T")
_Place = TypeVar("_Place")

REFUSALS = (InfeasibleError, StageError, UnsuitedMeshError)
"""Why there is no plan of a candidate."""


class Trail:
    """Is told what is being done, as `say`, and keeps what became of the candidates."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._outcomes: dict[str, CandidateOutcome] = {}
        self._known: dict[tuple[object, ...], Candidate | InfeasibleError | Beaten] = {}

    def __call__(self, text: str) -> None:
        self._say(text)

    @property
    def outcomes(self) -> tuple[CandidateOutcome, ...]:
        """What became of each candidate, in the order in which they were looked at."""
        return tuple(self._outcomes.values())

    def note(self, name: str, result: OutcomeKind, ns: int | None = None, reason: str = "") -> None:
        """Keeps what became of a candidate: the best plan of it, if there is one."""
        known, found = self._outcomes.get(name), CandidateOutcome(name, result, ns, reason)
        is_planned = known is not None and known.result == "planned"
        if known is None or not is_planned or (result == "planned" and (ns or 0) < (known.ns or 0)):
            self._outcomes[name] = found

    @contextmanager
    def once(self, request: PlanRequest, tried: CandidateAttempt[Candidate]) -> Generator[None]:
        """Within it, the `result` for a request that is `tried` is put in, or raised, unless it is
        there, known from another search of what is asked, or less."""
        options, cutoff = request.options, tried.needed_ns
        key = (
            *(request.mesh.text, request.microbatches, request.loss_chunks, request.tolerance),
            *(request.memory_limit_bytes, request.host_memory_bytes, options.residency),
        )
        known = self._known.get(key)
        if isinstance(known, Beaten) and (cutoff is None or known.bound < cutoff):
            known = None
        if isinstance(known, Exception):
            raise known
        tried.result = known
        try:
            yield
        except (InfeasibleError, Beaten) as error:
            self._known[key] = error
            raise
        assert tried.result is not None
        self._known[key] = tried.result

    def skip(self, name: str, threshold: str) -> None:
        """Candidates that are not looked at, for a threshold of the policy or what is known."""
        self(f"{name} are not looked at: {threshold}")
        self.note(name, "skipped", reason=threshold)


@dataclass(slots=True)
class CandidateAttempt(Generic[_T]):
    """A candidate that is tried: `with search.attempt() as tried`. Within it the plan becomes the
    `result`, which has to cost less than `needed_ns`, and what is raised says why there is none.
    Behind it the outcome is known: whether it `is_better` than those before, or refused, or else
    cut off; and whether memory binds, so that it `is_tight`."""

    search: CandidateSearch[_T]
    place: int
    name: str
    needed_ns: int | None
    result: _T | None = None
    is_better: bool = False
    is_refused: bool = False
    is_tight: bool = False

    def __enter__(self) -> CandidateAttempt[_T]:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or isinstance(error, (Beaten, *REFUSALS)):
            self.search.take(self, error)
            return True
        return False


@dataclass(slots=True)
class CandidateSearch(Generic[_T]):
    """What is known of the candidates so far. They cost what `cost_ns` says, in nanoseconds, and
    `bound_ns` what they are proven to; those that may not fit (`fits`) are worse than all that do.

    Only what costs less than `cutoff` is looked for, if that is given, and than the incumbent, to
    a `slack`, a part of it, more, or less if that is negative. Of equals the first stays, or the
    one whose `rank` is lower."""

    trail: Trail
    cost_ns: Callable[[_T], int]
    bound_ns: Callable[[_T], int] = lambda _: 0
    fits: Callable[[_T], bool] = lambda _: True
    is_tight: Callable[[_T], bool] = lambda _: False
    cutoff: int | None = None
    slack: float = 0.0
    incumbent: _T | None = None
    rank: int = 0
    bounds: dict[int, int] = field(default_factory=dict[int, int])
    """By rank, what no plan of a candidate takes less than."""
    failures: dict[int, Exception] = field(default_factory=dict[int, Exception])
    """By rank, why a candidate has no plan."""
    was_tight: bool = False
    """Whether the last that was cut off might be better if memory did not bind."""
    last: CandidateAttempt[_T] | None = None
    """What was tried last."""

    def attempt(
        self,
        *,
        name: str = "",
        rank: int | None = None,
        slack: float | None = None,
    ) -> CandidateAttempt[_T]:
        """Tries a candidate. What became of it is kept under its `name`, if it has one; a search
        within has kept that of its own."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.last = CandidateAttempt(self, place, name, self.needed_ns(place, slack))
        return self.last

    def take(self, tried: CandidateAttempt[_T], error: BaseException | None) -> None:
        """What became of a candidate: it has a plan, or an `error` says why it has none."""
        name, place = tried.name, tried.place
        if isinstance(error, Beaten):
            self.bounds[place], self.was_tight = error.bound, error.is_tight
            self._note(name, "not better", error.bound, message=f"{error}")
            tried.is_tight = error.is_tight
        elif isinstance(error, Exception):
            self.refuse(error, place, name)
            tried.is_refused = True
        elif tried.result is not None:
            self._note(name, "planned", self.cost_ns(tried.result))
            tried.is_better = self.submit(tried.result, place)
            tried.is_tight = self.is_tight(tried.result)

    def submit(self, candidate: _T, rank: int | None = None) -> bool:
        """Takes a plan there is. Whether it is better than those before."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.bounds[place] = self.bound_ns(candidate)
        is_better = self.incumbent is None or self._key(candidate, place) < self._key(
            self.incumbent, self.rank
        )
        if is_better:
            self.incumbent, self.rank = candidate, place
        return is_better

    def refuse(self, error: Exception, rank: int | None = None, name: str = "") -> None:
        """Why a candidate has no plan."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.failures[place] = error
        self._note(name, "infeasible", None, f"{error}", message=f"{error}")

    def in_sequence(self, places: Iterable[_Place]) -> Iterator[_Place]:
        """Those of `places` that are to be tried, one after the other, each of which takes less
        memory than the one before, and never less time: for as long as memory binds and each is
        better than the one before."""
        has_found = False
        for each in places:
            yield each
            tried = self.last
            assert tried is not None
            if tried.is_refused or (tried.result is None and tried.is_tight and not has_found):
                continue
            if not (tried.is_better and tried.is_tight):
                return
            has_found = True

    def line_search(self, places: Sequence[_Place], start: int) -> Iterator[_Place]:
        """Those of `places` that are to be tried, from number `start` on (`line_search`)."""

        def improved() -> bool:
            tried = self.last
            assert tried is not None
            return tried.is_better or (tried.is_refused and self.incumbent is None)

        return line_search(places, start, improved)

    def needed_ns(self, rank: int, slack: float | None = None) -> int | None:
        """What a candidate of such a `rank` has to cost less than; None if anything will do."""
        if self.incumbent is None or not self.fits(self.incumbent):
            return self.cutoff
        least = self.cost_ns(self.incumbent) + (rank < self.rank)
        own = least + int(least * (self.slack if slack is None else slack))
        return own if self.cutoff is None else min(own, self.cutoff)

    @property
    def least_ns(self) -> int:
        """What no candidate that was tried costs less than."""
        return min(self.bounds.values(), default=0)

    def forget(self, rank: int) -> None:
        """Nothing is said of a candidate any more."""
        self.bounds.pop(rank, None)
        self.failures.pop(rank, None)

    def result(self, name: str = "") -> _T:
        """The incumbent. Beaten, of the candidates of such a `name`, if all that have plans were
        cut off; else the failure of the lowest rank."""
        if self.incumbent is not None:
            return self.incumbent
        if self.bounds:
            raise Beaten(name, self.least_ns, is_tight=self.was_tight)
        if self.failures:
            raise self.failures[min(self.failures)]
        raise StageError("the devices are not shared by as many stages")

    def _key(self, candidate: _T, rank: int) -> tuple[bool, int, int]:
        return not self.fits(candidate), self.cost_ns(candidate), rank

    def _note(
        self, name: str, result: OutcomeKind, ns: int | None, reason: str = "", message: str = ""
    ) -> None:
        if name:
            self.trail.note(name, result, ns, reason)
            self.trail(message or f"{name}: {format_ns(ns or 0)}")


def line_search(
    line: Sequence[_Place], start: int, improved: Callable[[], bool]
) -> Iterator[_Place]:
    """Those of a `line` that are to be tried, from number `start` on: upwards, until one has not
    `improved` on what was found before, as is asked of each once it is tried; and downwards in the
    same way, unless upwards some did: the best of a line is expected between what is worse."""
    if line:
        yield line[start]
    for places in (line[start + 1 :], line[:start][::-1]):
        for passed, place in enumerate(places):
            yield place
            if not improved():
                if passed:
                    return
                break
