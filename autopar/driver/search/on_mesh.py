"""The best plan on one mesh, with the best numbers of microbatches and of chunks of the loss where
these are open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from autopar.cluster.mesh_shapes import candidate_meshes
from autopar.compile import best_on, check_least, check_surely
from autopar.driver.search.incumbent import CandidateAttempt, CandidateSearch, Trail
from autopar.driver.search.open_counts import (
    chunk_ladder,
    even_counts,
    in_chunks,
    likely_count,
    most_saved_bytes,
    possible_counts,
)
from autopar.errors import InfeasibleError
from autopar.ir.passes.losses import heads_of
from autopar.plans.memory_refinement import Beaten, Candidate, MemoryRefinement, bounded
from autopar.plans.provenance import FRAGILE
from autopar.plans.requests.options import AUTO
from autopar.plans.requests.request import PlanRequest
from autopar.plans.work import check_ns


@dataclass(frozen=True, slots=True)
class _Try:
    """A candidate: its request, its attempt, and the plan or search that its solve starts from. If
    it `is_probe`, the solve ends where memory binds."""

    request: PlanRequest
    attempt: CandidateAttempt[Candidate]
    after: Candidate | None = None
    free: MemoryRefinement | None = None
    is_probe: bool = False


def best_on_mesh(
    request: PlanRequest,
    trail: Trail,
    cutoff: int | None = None,
    *,
    after: Candidate | None = None,
    near: int | None = None,
) -> Candidate:
    """`compile.best_on`, with the loss whole, and then in chunks as well if memory binds. Chunks
    take less memory, and more time where scores are computed twice.

    If the number of microbatches is open, it is one if that fits without saving memory. If not, it
    is one of `possible_counts`: the search begins `near` one if given, or else near a likely one,
    and goes in both directions as long as plans are better. More of them take less memory and never
    less time. The first solve with the loss whole starts from the plan `after`, in which memory
    binds, and each later one from the plan before.
    """
    forms = _search(request, trail, cutoff)
    for each in _in_each_form(request, forms, after, near):
        with each.attempt as tried:
            if not each.is_probe:
                _check_memory(each.request, trail, tried.search)
            with trail.once(each.request, tried):
                if tried.result is None:
                    trail.go_on(each.request.name)
                    trail(f"solving for {each.request.name}")
                    tried.result = best_on(
                        each.request, trail, tried.needed_ns,
                        after=each.after, free=each.free, is_probe=each.is_probe,
                    )  # fmt: skip
    return _result(forms, request)


def _in_each_form(
    request: PlanRequest,
    forms: CandidateSearch[Candidate],
    after: Candidate | None,
    near: int | None,
) -> Iterator[_Try]:
    """The candidates with the loss whole, and with the loss in chunks."""
    whole: dict[int, Candidate] = {}
    free: MemoryRefinement | None = None
    for is_chunked in _forms(request, forms):
        with forms.attempt() as form:
            counts = _search(request, forms.trail, form.needed_ns)
            if request.options.microbatches is None and not is_chunked:
                probe = counts.attempt(name=request.name)
                yield _Try(request, probe, is_probe=True)
                free = probe.free
                if free is None:
                    form.result = _result(counts, request)
                    continue
            # A solve that starts from the plan of another mesh skips the one without a limit. With
            # the loss in chunks that one mostly takes too long, which ends the mesh soon.
            start = forms.incumbent or (None if is_chunked else after)
            counted = _Counts(request, counts, whole, start, free, is_chunked=is_chunked)
            yield from counted.candidates(forms.incumbent, near)
            form.result = _result(counts, request)


@dataclass(frozen=True, slots=True)
class _Counts:
    """The numbers of microbatches with the loss whole, or in chunks. Plans with a whole loss are
    added to `whole`, by that number. The first solve starts from the plan `after`, or from the
    search `free`, which is of one microbatch with the loss whole."""

    request: PlanRequest
    search: CandidateSearch[Candidate]
    whole: dict[int, Candidate]
    after: Candidate | None
    free: MemoryRefinement | None
    is_chunked: bool

    def candidates(self, known: Candidate | None, near: int | None) -> Iterator[_Try]:
        """The candidates of each number, from a likely one on: `near` if given, or that of the
        plan `known` with the loss whole."""
        line, count = self._line(), 1
        if known is not None:
            count = known.request.microbatches
        elif near is not None:
            count = near
        elif self.free is not None and self.free.estimates is not None:
            freed_bytes = most_saved_bytes(self.request) if self.is_chunked else 0
            count = likely_count(self.request, self.free.estimates, freed_bytes)
        start = max((k for k, each in enumerate(line) if each.microbatches <= count), default=0)
        for here in self.search.from_likely(line, start):
            yield from self._of_count(here)

    def _line(self) -> Sequence[PlanRequest]:
        """The request in each number of microbatches. Where many devices share the samples, on one
        axis, more microbatches than that allows are left to meshes of two axes, if there are any:
        these can shard something else besides."""
        line = tuple(_in_microbatches(self.request, self.is_chunked))
        request, even = self.request, [*even_counts(self.request)]
        shared = [each for each in line if each.microbatches <= even[-1]]
        options, cluster = request.options, request.cluster
        is_open = options.mesh == AUTO and not options.imposed
        if (
            not len(line) > len(shared) > 1 == len(request.mesh.sizes)
            or not is_open
            or cluster.num_devices < options.policy.refined_devices
            or len(candidate_meshes(cluster, 2)) == 1
        ):
            return line
        more = f"{request.name} in more than {even[-1]} microbatches"
        self.search.trail.skip(more, "samples that do not divide")
        return shared

    def _of_count(self, here: PlanRequest) -> Iterator[_Try]:
        """The candidates of a number of microbatches."""
        with self.search.attempt() as counted:
            chunks = _search(here, self.search.trail, counted.needed_ns)
            requests = _in_chunks(here, self.is_chunked)
            _check_memory(requests[-1], self.search.trail, self.search)
            if self.is_chunked:
                _check_worth(here, self.whole, counted.needed_ns)
            for each in chunks.in_sequence(requests):
                after = chunks.incumbent or self.search.incumbent or self.after
                if each == self.request and self.free is not None:
                    after = None
                yield _Try(each, chunks.attempt(name=each.name), after, self.free)
            counted.result = _result(chunks, here)
            if not self.is_chunked:
                self.whole[here.microbatches] = counted.result


def _forms(request: PlanRequest, forms: CandidateSearch[Candidate]) -> Iterator[bool]:
    """Whether the loss is in chunks: False first, and then True if memory binds."""
    yield False
    tried = forms.last
    binds = tried is not None and (
        tried.is_refused or tried.is_tight or _is_split(request, tried.result)
    )
    if not binds or request.options.loss_chunks is not None or not heads_of(request.graph):
        return
    if in_chunks(request).loss_chunks == request.loss_chunks:
        few = f"chunks_worth {request.options.policy.chunks_worth}"
        forms.trail.skip(f"{request.name}, the loss in chunks", few)
        return
    forms.trail(f"{request.mesh}: with the loss in chunks")
    yield True


def _is_split(request: PlanRequest, candidate: Candidate | None) -> bool:
    """Whether a plan is in microbatches that were not asked for."""
    is_open = request.options.microbatches is None
    return is_open and candidate is not None and candidate.request.microbatches > 1


def _in_microbatches(request: PlanRequest, is_chunked: bool) -> Iterator[PlanRequest]:
    """The request in each number of microbatches, as long as the loss can be so."""
    is_open = request.options.microbatches is None
    possible = possible_counts(request.graph, request.cluster.num_devices)
    for count in possible if is_open else (request.microbatches,):
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
    """Beaten if a plan with the loss in chunks is not expected to take less than `least_ns`, by
    more than trifles. Compared with the `whole` loss in as many microbatches, it saves at most what
    the freed memory is worth."""
    if least_ns is None or request.microbatches not in whole:
        return
    beside = whole[request.microbatches].solution
    if beside.byte_ns is not None:
        saved_ns = ceil(beside.byte_ns * most_saved_bytes(request))
        if beside.objective - saved_ns >= least_ns * (1 - FRAGILE):
            bound = max(0, beside.bound - saved_ns)
            raise Beaten(f"{request.name} in chunks", bound, is_tight=True)
