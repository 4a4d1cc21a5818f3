"""The best plan on one mesh: in as many microbatches, with the loss in as many chunks, as are best
where that is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import ceil

from autopar.compile import best_on, check_least
from autopar.driver.chunk_counts import chunk_ladder, in_chunks, most_saved_bytes
from autopar.driver.incumbent import CandidateSearch, Trail
from autopar.driver.microbatching import possible_counts
from autopar.errors import InfeasibleError
from autopar.ir.problem import Solution
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.request import PlanRequest

_Ladder = Callable[[PlanRequest], Sequence[int]]
"""The numbers of chunks to try."""


def best_on_mesh(
    request: PlanRequest,
    trail: Trail,
    cutoff: int | None = None,
    *,
    after: Candidate | None = None,
) -> Candidate:
    """`compile.best_on`, with the loss whole, and in chunks as well if memory binds then: chunks
    take less memory, and more time where scores are computed twice. Of numbers of microbatches that
    are open, powers of two are tried for as long as memory binds and each is better than the one
    before: more of them take less memory and never less time. The first plan is found from the one
    `after` which it comes, in which memory binds, and each from the one before."""
    forms = _search(request, trail, cutoff)
    whole: dict[int, Candidate] = {}

    def in_one_piece(least: int | None) -> Candidate:
        return _in_microbatches(request, lambda r: (r.loss_chunks,), trail, least, after, whole)

    def chunked(least: int | None) -> Candidate:
        trail(f"{request.mesh}: with the loss in chunks")
        start = forms.incumbent or after
        return _in_microbatches(request, chunk_ladder, trail, least, start, {}, whole)

    tried = forms.attempt(in_one_piece)
    binds = tried.is_refused or tried.is_tight
    if binds and in_chunks(request).loss_chunks != request.loss_chunks:
        forms.attempt(chunked)
    return _result(forms, request)


def _in_microbatches(
    request: PlanRequest,
    ladder: _Ladder,
    trail: Trail,
    cutoff: int | None,
    after: Candidate | None,
    each: dict[int, Candidate],
    whole: dict[int, Candidate] | None = None,
) -> Candidate:
    """The best over numbers of microbatches, with the loss in one of a `ladder` of numbers of
    chunks: as long as there is one, and it may be worth it beside the plans with the `whole` loss.
    The best of each number is added to `each`."""
    counts = _search(request, trail, cutoff)

    def planned(count: int, least: int | None) -> Candidate:
        here = replace(request, microbatches=count)
        if counts.failures and counts.incumbent is None:
            _check_least(replace(here, loss_chunks=ladder(here)[-1]), trail)
        if least is not None and whole is not None and count in whole:
            _check_worth(here, whole[count].solution, least)
        each[count] = _in_chunks(here, ladder(here), trail, least, counts.incumbent or after)
        return each[count]

    is_open = request.options.microbatches is None
    listed = possible_counts(request.graph) if is_open else (request.microbatches,)
    has_chunks = takewhile(lambda n: ladder(replace(request, microbatches=n)), listed)
    counts.in_line(has_chunks, planned)
    return _result(counts, request)


def _in_chunks(
    request: PlanRequest,
    ladder: Sequence[int],
    trail: Trail,
    cutoff: int | None,
    after: Candidate | None,
) -> Candidate:
    """The best over a `ladder` of numbers of chunks, few first. What it proves is of those that
    were tried."""
    chunks = _search(request, trail, cutoff)

    def planned(count: int, least: int | None) -> Candidate:
        here = replace(request, loss_chunks=count)
        if chunks.failures and chunks.incumbent is None:
            _check_least(here, trail)
        start = chunks.incumbent or after
        return trail.once(here, least, partial(solved, here, least, start))

    def solved(here: PlanRequest, least: int | None, start: Candidate | None) -> Candidate:
        trail(f"solving for {here.name}")
        return best_on(here, trail, least, after=start)

    chunks.in_line(ladder, planned, name=lambda n: replace(request, loss_chunks=n).name)
    return _result(chunks, request)


def _search(request: PlanRequest, trail: Trail, cutoff: int | None) -> CandidateSearch[Candidate]:
    return CandidateSearch(
        trail,
        cost_ns=lambda found: found.solution.objective,
        bound_ns=lambda found: found.solution.bound,
        is_tight=lambda found: found.is_tight,
        cutoff=cutoff,
        slack=-request.tolerance,
    )


def _result(search: CandidateSearch[Candidate], request: PlanRequest) -> Candidate:
    best = search.result(request.name)
    return replace(best, solution=bounded(best.solution, search.least_ns))


def _check_least(request: PlanRequest, trail: Trail) -> None:
    """`compile.check_least`, of a candidate that is not looked at any further."""
    try:
        check_least(request)
    except InfeasibleError as error:
        trail(f"{request.name}: {error}")
        trail.note(request.name, "infeasible", reason=f"{error}")
        raise


def _check_worth(request: PlanRequest, whole: Solution, least: int) -> None:
    """Beaten if a plan with the loss in chunks is not expected to take less than `least`: beside
    one with the `whole` loss it saves no more than the memory that is free then is worth."""
    if whole.byte_ns is not None:
        saved_ns = ceil(whole.byte_ns * most_saved_bytes(request))
        if whole.objective - saved_ns >= least:
            bound = max(0, whole.bound - saved_ns)
            raise Beaten(f"{request.name} in chunks", bound, is_tight=True)
