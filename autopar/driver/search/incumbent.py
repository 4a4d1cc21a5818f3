"""The incumbent of a search: the best candidate so far, a bound that no candidate beats, and why
there is none if there is none. Every search of the driver is a `CandidateSearch`: over meshes,
microbatches, chunks of the loss, segments or pipelines. A search within another is an attempt of
it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autopar.errors import InfeasibleError, StageError, UnsuitedMeshError
from autopar.ir.units import format_ns
from autopar.plans.memory_refinement import Beaten, Candidate, MemoryBinds, MemoryRefinement
from autopar.plans.provenance import WORK_LIMIT, CandidateOutcome, OutcomeKind, SearchStep
from autopar.plans.requests.request import PlanRequest

_T = TypeVar("_T")
_Place = TypeVar("_Place")
_Outcome = Candidate | InfeasibleError | Beaten


class Stopped(Exception):
    """The search was ended before it was over: a candidate was not looked at, or not to its end."""

    def __init__(self, why: str = "the search was interrupted") -> None:
        super().__init__(why)


REFUSALS = (InfeasibleError, StageError, UnsuitedMeshError)
"""Why there is no plan of a candidate."""


class Trail:
    """Reports progress to `say`, and stores the outcomes of candidates. With `stops`, Ctrl-C ends
    the search with the best plan so far, if there is one. So does counted work of more than
    `work_limit_s`, if that is not 0, once there is a plan."""

    def __init__(
        self, say: Callable[[str], None], *, stops: bool = False, work_limit_s: float = 0
    ) -> None:
        self._say, self._stops, self._work_limit_s = say, stops, work_limit_s
        self._work_ns = 0
        self.why = ""
        """Why the search is to end, be it over or not; empty while it may go on."""
        self.is_stopped = False
        """Whether the search was ended before it was over: something was not looked at."""
        self._outcomes: dict[str, CandidateOutcome] = {}
        self._known: dict[tuple[object, ...], tuple[_Outcome, int]] = {}
        """What became of a request, and the cutoff that it had; 0 for none."""
        self._rough: list[Candidate] = []
        """Plans that fit, of the candidate at hand, of which a better one is looked for."""
        self._is_at_hand = False
        """Whether there is one (`once`): other plans are of what is not asked for."""

    def __call__(self, text: str) -> None:
        """Reports progress. Stopped if the search may end there, and was ended, or has come to its
        limit of work."""
        step = text if isinstance(text, SearchStep) else SearchStep(text)
        plan = step.plan if self._is_at_hand else None
        if isinstance(plan, Candidate):
            self._rough.append(plan)
            self.note(plan.request.name, "planned", plan.solution.objective)
        self._say(SearchStep(text, self.outcomes, step.work_ns, may_end=step.may_end))
        self.count(step.work_ns)
        if step.may_end:
            self.go_on()

    def restart(self) -> None:
        """Begins a search for what is not asked for, after one that has no plan: with its own limit
        of work, and with no outcomes."""
        self._work_ns, self._outcomes = 0, {}

    def count(self, work_ns: int) -> None:
        """Counts work, which ends the search at the limit, once there is a plan."""
        self._work_ns += work_ns
        is_over = 0 < self._work_limit_s * 10**9 < self._work_ns
        has_plan = any(each.result == "planned" for each in self.outcomes)
        if is_over and has_plan and not self.why:
            self.why = WORK_LIMIT

    @property
    def is_limited(self) -> bool:
        """Whether the limit of work ended the search before it was over."""
        return self.is_stopped and self.why == WORK_LIMIT

    def go_on(self, name: str = "") -> None:
        """Stopped if the search is to end. The candidate `name` was not looked at then."""
        if self.why:
            self.is_stopped = True
            if name:
                self.skip(name, self.why)
            raise Stopped(self.why)

    def is_ended_by(self, error: BaseException | None) -> bool:
        """Whether an `error` in a candidate ends the search, which is stopped then."""
        if isinstance(error, KeyboardInterrupt):
            if self._stops:
                self.why, self.is_stopped = f"{Stopped()}", True
            return self._stops
        return self.is_stopped and isinstance(error, Stopped)

    @property
    def outcomes(self) -> tuple[CandidateOutcome, ...]:
        """The outcome of each candidate, in the order in which they were tried."""
        return tuple(self._outcomes.values())

    @property
    def planned(self) -> tuple[Candidate, ...]:
        """The plans of all candidates on one mesh (`once`), and rough ones of that at hand."""
        known = (each for each, _ in self._known.values() if isinstance(each, Candidate))
        return (*known, *self._rough)

    def note(self, name: str, result: OutcomeKind, ns: int | None = None, reason: str = "") -> None:
        """Stores the outcome of a candidate: of several plans the best, and of what another search
        has looked at not that it was skipped."""
        known, outcome = self._outcomes.get(name), CandidateOutcome(name, result, ns, reason)
        if known is not None and result == "skipped":
            if known.result == "estimated" and reason:
                self._outcomes[name] = CandidateOutcome(name, known.result, known.ns, reason)
            return
        is_planned = known is not None and known.result == "planned"
        if (
            known is None
            or not is_planned
            or (result == "planned" and (ns or 0) <= (known.ns or 0))
        ):
            self._outcomes[name] = outcome

    @contextmanager
    def once(self, request: PlanRequest, tried: CandidateAttempt[Candidate]) -> Generator[None]:
        """Within it, the caller sets the `result` of an attempt, unless another search of this
        trail has had the same request. Then the `result` is set already, or its error is raised. If
        the search is ended within it, the `result` is the plan so far, if there is one."""
        options, cutoff = request.options, tried.needed_ns
        key = (
            *(request.mesh.text, request.microbatches, request.loss_chunks, request.tolerance),
            *(request.memory_limit_bytes, request.host_memory_bytes, options.residency),
        )
        known, known_cutoff = self._known.get(key, (None, 0))
        if isinstance(known, Beaten) and (
            cutoff is None or max(known.bound, known_cutoff) < cutoff
        ):
            known = None
        if isinstance(known, Exception):
            raise known
        tried.result = known
        self._rough, self._is_at_hand = [], True
        try:
            yield
        except (KeyboardInterrupt, Stopped):
            tried.result = next(reversed(self._rough), None)
            raise
        except (InfeasibleError, Beaten) as error:
            self._known[key] = error, cutoff or 0
            raise
        finally:
            self._is_at_hand = False
        assert tried.result is not None
        self._rough = []
        self._known[key] = tried.result, cutoff or 0

    def skip(self, name: str, threshold: str) -> None:
        """Reports candidates that are not tried, for a threshold of the policy, what is known, or
        since the search is to end."""
        self.is_stopped |= threshold == self.why
        self(f"{name} are not looked at: {threshold}")
        self.note(name, "skipped", reason=threshold)


@dataclass(slots=True)
class CandidateAttempt(Generic[_T]):
    """A candidate that is tried: `with search.attempt() as tried`. Within it the caller sets the
    `result`, which has to cost less than `needed_ns`, or an error says why there is none. After it
    the outcome is known: the plan `is_better` than those before, or `is_refused`, or else cut off.
    It `is_tight` if memory binds. If it was to show no more than that, `free` has the best plan
    whatever its memory."""

    search: CandidateSearch[_T]
    place: int
    name: str
    needed_ns: int | None
    result: _T | None = None
    is_better: bool = False
    is_refused: bool = False
    is_tight: bool = False
    free: MemoryRefinement | None = None

    def __enter__(self) -> CandidateAttempt[_T]:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, KeyboardInterrupt) and self.search.trail.is_ended_by(error):
            error = Stopped()
        if error is None or isinstance(error, (Beaten, MemoryBinds, Stopped, *REFUSALS)):
            try:
                self.search.take(self, error)
            except KeyboardInterrupt as late:  # while it was reported
                if not self.search.trail.is_ended_by(late):
                    raise
            return True
        return False


@dataclass(slots=True)
class CandidateSearch(Generic[_T]):
    """The candidates so far. `cost_ns` is what one costs, and `bound_ns` its proven bound, in
    nanoseconds. Those that may not fit (`fits`) are worse than all that do.

    A candidate has to cost less than `cutoff`, if given, and than the incumbent. `slack`, a part of
    the incumbent's cost, allows more, or less if it is negative. Of equals the first stays, or the
    one whose `rank` is lower.
    """

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
    """By rank, the least that any plan of a candidate takes."""
    failures: dict[int, Exception] = field(default_factory=dict[int, Exception])
    """By rank, why a candidate has no plan."""
    was_tight: bool = False
    """Whether the last that was cut off might be better if memory did not bind."""
    stopped: Stopped | None = None
    """Why a candidate was not looked at to its end."""
    last: CandidateAttempt[_T] | None = None
    """The last attempt."""

    def attempt(
        self,
        *,
        name: str = "",
        rank: int | None = None,
        slack: float | None = None,
    ) -> CandidateAttempt[_T]:
        """Tries a candidate. Its outcome is stored under its `name`, if it has one; a search within
        stores outcomes of its own."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.last = CandidateAttempt(self, place, name, self.needed_ns(place, slack))
        return self.last

    def take(self, tried: CandidateAttempt[_T], error: BaseException | None) -> None:
        """The outcome of a candidate: its plan, or an `error` that says why it has none."""
        name, place = tried.name, tried.place
        if isinstance(error, Stopped):
            self.stopped = error
            result: OutcomeKind = "skipped"
            cost_ns = None
            if tried.result is not None:
                tried.is_better = self.submit(tried.result, place)
                result, cost_ns = "planned", self.cost_ns(tried.result)
            self._note(name, result, cost_ns, f"{error}", message=f"{name}: {error}")
        elif isinstance(error, MemoryBinds):
            tried.free, tried.is_tight = error.free, True
            self._note(name, "skipped", None, f"{error}", message=f"{name}: {error}")
        elif isinstance(error, Beaten):
            self.bounds[place], self.was_tight = error.bound, error.is_tight
            self._note(name, "not better", error.bound, message=f"{error}")
            tried.is_tight = error.is_tight
        elif isinstance(error, Exception):
            self.refuse(error, place, name)
            tried.is_refused = True
        elif tried.result is not None:
            tried.is_better = self.submit(tried.result, place)
            tried.is_tight = self.is_tight(tried.result)
            self._note(name, "planned", self.cost_ns(tried.result))

    def submit(self, candidate: _T, rank: int | None = None) -> bool:
        """Adds a plan that exists already; whether it is better than those before."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.bounds[place] = self.bound_ns(candidate)
        is_better = self.incumbent is None or self._key(candidate, place) < self._key(
            self.incumbent, self.rank
        )
        if is_better:
            self.incumbent, self.rank = candidate, place
        return is_better

    def refuse(self, error: Exception, rank: int | None = None, name: str = "") -> None:
        """Stores why a candidate has no plan."""
        place = len(self.bounds) + len(self.failures) if rank is None else rank
        self.failures[place] = error
        self._note(name, "infeasible", None, f"{error}", message=f"{error}")

    def in_sequence(self, places: Iterable[_Place]) -> Iterator[_Place]:
        """The `places` to try, one after the other. Each takes less memory than the one before, and
        never less time. They go on as long as memory binds and each is better than the one
        before."""
        has_plan = False
        for each in places:
            yield each
            tried = self.last
            assert tried is not None
            if tried.is_refused or (tried.result is None and tried.is_tight and not has_plan):
                continue
            if not (tried.is_better and tried.is_tight):
                return
            has_plan = True

    def from_likely(self, places: Sequence[_Place], start: int) -> Iterator[_Place]:
        """The `places` to try, of which each takes less memory than the one before: from number
        `start` on, and if none of those is better than the first, those before it as long as each
        is better."""
        tried: list[CandidateAttempt[_T]] = []
        for each in self.in_sequence(places[start:]):
            yield each
            assert self.last is not None
            tried.append(self.last)
        if tried[0].is_refused or any(each.is_better for each in tried[1:]):
            return
        for each in reversed(places[:start]):
            yield each
            assert self.last is not None
            if not self.last.is_better:
                return

    def line_search(self, places: Sequence[_Place], start: int) -> Iterator[_Place]:
        """The `places` to try, from number `start` on (`line_search`)."""

        def improved() -> bool:
            tried = self.last
            assert tried is not None
            return tried.is_better or (tried.is_refused and self.incumbent is None)

        return line_search(places, start, improved)

    def needed_ns(self, rank: int, slack: float | None = None) -> int | None:
        """The cost that a candidate of this `rank` has to be below; None if any will do."""
        if self.incumbent is None or not self.fits(self.incumbent):
            return self.cutoff
        least = self.cost_ns(self.incumbent) + (rank < self.rank)
        own = least + int(least * (self.slack if slack is None else slack))
        return own if self.cutoff is None else min(own, self.cutoff)

    @property
    def least_ns(self) -> int:
        """The least that any candidate so far costs."""
        return min(self.bounds.values(), default=0)

    def forget(self, rank: int) -> None:
        """Drops the bound and failure of a candidate."""
        self.bounds.pop(rank, None)
        self.failures.pop(rank, None)

    def result(self, name: str = "") -> _T:
        """The incumbent. Stopped if there is none as the search was ended; Beaten, with `name`, if
        all candidates with plans were cut off; else the failure of the lowest rank."""
        if self.incumbent is not None:
            return self.incumbent
        if self.stopped is not None:
            raise Stopped(f"{self.stopped}")
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
    """The places of a `line` to try, from number `start` on. It goes upwards until one has not
    `improved`, which is called after each. Then it goes downwards in the same manner, unless
    upwards some did: the best of a line is expected between worse ones."""
    if line:
        yield line[start]
    for places in (line[start + 1 :], line[:start][::-1]):
        for passed, place in enumerate(places):
            yield place
            if not improved():
                if passed:
                    return
                break
