"""The best plan on one mesh, with the best numbers of microbatches and of chunks of the loss where
these are open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from autopar.compile import best_on, check_least, check_surely
from autopar.driver.search.incumbent import CandidateAttempt, CandidateSearch, Trail
from autopar.driver.search.open_counts import (
    chunk_ladder,
    in_chunks,
    most_saved_bytes,
    possible_counts,
)
from autopar.errors import InfeasibleError
from autopar.ir.passes.losses import heads_of
from autopar.plans.memory_refinement import Beaten, Candidate, bounded
from autopar.plans.requests.request import PlanRequest
from autopar.plans.work import check_ns


def best_on_mesh(
    request: PlanRequest,
    trail: Trail,
    cutoff: int | None = None,
    *,
    after: Candidate | None = None,
) -> Candidate:
    """`compile.best_on`, with the loss whole, and then in chunks as well if memory binds. Chunks
    take less memory, and more time where scores are computed twice.

    If the number of microbatches is open, powers of two are tried, as long as memory binds and each
    is better than the one before. More of them take less memory and never less time. The first
    solve with the loss whole starts from the plan `after`, in which memory binds, and each later
    one from the plan before.
    """
    forms = _search(request, trail, cutoff)
    for each, tried, start in _in_each_form(request, forms, after):
        with tried:
            _check_memory(each, trail, tried.search)
            with trail.once(each, tried):
                if tried.result is None:
                    trail(f"solving for {each.name}")
                    tried.result = best_on(each, trail, tried.needed_ns, after=start)
    return _result(forms, request)


_Candidates = Iterator[tuple[PlanRequest, CandidateAttempt[Candidate], Candidate | None]]
"""The request of each candidate, its attempt, and the plan that its solve starts from."""


def _in_each_form(
    request: PlanRequest, forms: CandidateSearch[Candidate], after: Candidate | None
) -> _Candidates:
    """The candidates with the loss whole, and with the loss in chunks."""
    whole: dict[int, Candidate] = {}
    for is_chunked in _forms(request, forms):
        with forms.attempt() as form:
            counts = _search(request, forms.trail, form.needed_ns)
            # A solve that starts from the plan of another mesh skips the one without a limit. With
            # the loss in chunks that one mostly takes too long, which ends the mesh soon.
            start = forms.incumbent or (None if is_chunked else after)
            for here in counts.in_sequence(_in_microbatches(request, is_chunked)):
                with counts.attempt() as counted:
                    yield from _of_count(here, counts, counted, whole, start, is_chunked=is_chunked)
                if counted.is_refused and counts.incumbent is None and not is_chunked:
                    yield from _chunked(here, forms)
                    counts.cutoff = forms.needed_ns(0)
            form.result = _result(counts, request)


def _of_count(
    here: PlanRequest,
    counts: CandidateSearch[Candidate],
    counted: CandidateAttempt[Candidate],
    whole: dict[int, Candidate],
    after: Candidate | None,
    *,
    is_chunked: bool,
) -> _Candidates:
    """The candidates of a number of microbatches. A plan with a whole loss is added to `whole`, by
    that number."""
    chunks = _search(here, counts.trail, counted.needed_ns)
    requests = _in_chunks(here, is_chunked)
    _check_memory(requests[-1], counts.trail, counts)
    if is_chunked:
        _check_worth(here, whole, counted.needed_ns)
    for each in chunks.in_sequence(requests):
        start = chunks.incumbent or counts.incumbent or after
        yield each, chunks.attempt(name=each.name), start
    counted.result = _result(chunks, here)
    if not is_chunked:
        whole[here.microbatches] = counted.result


def _chunked(here: PlanRequest, forms: CandidateSearch[Candidate]) -> _Candidates:
    """The candidates with the loss in chunks, where it does not fit as a whole and nothing else has
    fitted so far: a first plan sooner than in more microbatches, and one to be better than. Later
    searches do not solve them again."""
    is_open = here.options.loss_chunks is None and forms.needed_ns(1) is None
    if not (is_open and _in_chunks(here, is_chunked=True)):
        return
    sooner = _search(here, forms.trail, forms.cutoff)
    with sooner.attempt() as counted:
        yield from _of_count(here, sooner, counted, {}, None, is_chunked=True)
    if sooner.incumbent is not None:
        forms.submit(sooner.incumbent, 1)
    elif sooner.bounds:
        forms.bounds[1] = sooner.least_ns


def _forms(request: PlanRequest, forms: CandidateSearch[Candidate]) -> Iterator[bool]:
    """Whether the loss is in chunks: False first, and then True if memory binds."""
    yield False
    tried = forms.last
    binds = tried is not None and (tried.is_refused or tried.is_tight)
    if not binds or request.options.loss_chunks is not None or not heads_of(request.graph):
        return
    if in_chunks(request).loss_chunks == request.loss_chunks:
        few = f"chunks_worth {request.options.policy.chunks_worth}"
        forms.trail.skip(f"{request.name}, the loss in chunks", few)
        return
    forms.trail(f"{request.mesh}: with the loss in chunks")
    yield True


def _in_microbatches(request: PlanRequest, is_chunked: bool) -> Iterator[PlanRequest]:
    """The request in each number of microbatches, as long as the loss can be so."""
    is_open = request.options.microbatches is None
    for count in possible_counts(request.graph) if is_open else (request.microbatches,):
        here = replace(request, microbatches=count)
        if not _in_chunks(here, is_chunked):
            return
        yield here


def _in_chunks(request: PlanRequest, is_chunked: bool) -> Sequence[PlanRequest]:
    """The request with the loss whole, in the number of chunks that is given, or in several
    numbers, few first. What is proven is of those that are tried."""
    if not is_chunked:
        return (request,)
    return [replace(request, loss_chunks=count) for count in chunk_ladder(request)]


def _search(request: PlanRequest, trail: Trail, cutoff: int | None) -> CandidateSearch[Candidate]:
    return CandidateSearch(
        trail,
        cost_ns=lambda candidate: candidate.solution.objective,
        bound_ns=lambda candidate: candidate.solution.bound,
        is_tight=lambda candidate: candidate.is_tight,
        cutoff=cutoff,
        slack=-request.tolerance,
    )


def _result(search: CandidateSearch[Candidate], request: PlanRequest) -> Candidate:
    best = search.result(request.name)
    return replace(best, solution=bounded(best.solution, search.least_ns))


def _check_memory(request: PlanRequest, trail: Trail, search: CandidateSearch[Candidate]) -> None:
    """InfeasibleError if a candidate of a search surely does not fit, which takes no solve to know.
    If none has fitted so far, prices are worth it."""
    trail.count(check_ns(request.graph))
    trail.go_on(request.name)
    try:
        check_surely(request)
        if search.failures and search.incumbent is None:
            check_least(request)
    except InfeasibleError as error:
        trail(f"{error}")
        trail.note(request.name, "infeasible", reason=f"{error}")
        raise


def _check_worth(
    request: PlanRequest, whole: Mapping[int, Candidate], least_ns: int | None
) -> None:
    """Beaten if a plan with the loss in chunks is not expected to take less than `least_ns`.
    Compared with the `whole` loss in as many microbatches, it saves at most what the freed memory
    is worth."""
    if least_ns is None or request.microbatches not in whole:
        return
    beside = whole[request.microbatches].solution
    if beside.byte_ns is not None:
        saved_ns = ceil(beside.byte_ns * most_saved_bytes(request))
        if beside.objective - saved_ns >= least_ns:
            bound = max(0, beside.bound - saved_ns)
            raise Beaten(f"{request.name} in chunks", bound, is_tight=True)
