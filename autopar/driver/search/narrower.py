"""A wider request never gives a longer step.

Plans are chosen by the step as modelled, and predicted by the step as simulated. A wider search
finds a plan that is as good or better as modelled, but may be longer as simulated. Where a plan
uses what was left open, the best plan without that is therefore searched too, and the shorter of
both is taken. Then the predicted step is never longer than that of a narrower request.

Proof, by induction over what is left open. If the plan is one of the narrower request as well, it
is the best of that too, and what is compared with it is no less. If it is not, it uses something
that is not open there, and the plan found without that is as short or shorter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from autopar.driver.search.finding import Finding
from autopar.driver.search.incumbent import CandidateAttempt, CandidateSearch, Trail
from autopar.errors import SolverError
from autopar.plans.requests.options import AUTO, Options
from autopar.plans.requests.request import GraphRequest


def findings(trail: Trail) -> CandidateSearch[Finding]:
    """A search for the shortest step, as simulated."""
    return CandidateSearch(trail, cost_ns=lambda finding: finding.step_ns)


class Widened:
    """The searches for a request, and for narrower ones: `for each in widened`, `with
    widened.attempt() as tried`. A plan that is `known` is to be beaten."""

    def __init__(
        self, graph_request: GraphRequest, trail: Trail, known: Finding | None = None
    ) -> None:
        self._request, self._trail, self._known = graph_request, trail, known
        self._search = findings(trail)
        self._above: list[tuple[Finding, ...]] = []
        """For each request that was tried, the findings of wider requests, the widest first."""

    def __iter__(self) -> Iterator[GraphRequest]:
        """The request, and each narrower request of one whose plan uses what is open."""
        return self._each(self._request, ())

    def _each(
        self, graph_request: GraphRequest, above: tuple[Finding, ...]
    ) -> Iterator[GraphRequest]:
        self._above.append(above)
        yield graph_request
        tried = self._search.last
        finding = None if tried is None else tried.result
        if finding is None or finding is self._known:
            return
        for what, options in _narrower(graph_request.options, finding):
            if self._trail.why:
                self._trail.skip(f"plans without {what}", self._trail.why)
                return
            self._trail(f"{what}: looking for the best plan without")
            yield from self._each(replace(graph_request, options=options), (*above, finding))

    @contextmanager
    def attempt(self) -> Generator[CandidateAttempt[Finding]]:
        """Within it, a request is searched."""
        try:
            with self._search.attempt(rank=len(self._above)) as tried:
                yield tried
        except SolverError as error:
            # With a plan at hand, the search of a narrower request may run out of time.
            if self._search.incumbent is None:
                raise
            self._trail(f"{error}")

    def result(self) -> Finding:
        """The finding with the shortest step, with what is known of all plans beside it. Raises why
        there is none."""
        best = self._search.result()
        if best is self._known:
            return best
        for wider in reversed(self._above[self._search.rank - 1]):
            others = (*best.others, *wider.beside)
            best = replace(best.proven(min(best.bound_ns, wider.bound_ns)), others=others)
        return best


def _narrower(options: Options, finding: Finding) -> Iterator[tuple[str, Options]]:
    """What a plan uses of what is open, and the options without that."""
    requests = [stage.request for stage in finding.stages]
    # What is open also changes which pipelines are planned.
    is_staged = len(requests) > 1
    if options.loss_chunks is None and any(each.loss_chunks > 1 for each in requests):
        yield "chunks of the loss", replace(options, loss_chunks=1)
    if options.microbatches is None and len(requests) == 1 and finding.microbatches > 1:
        yield "microbatches", replace(options, microbatches=1)
    is_on_host = is_staged or any(each.params_on_host for each in requests)
    # Where that is not asked for, nothing fits without.
    is_given = options.residency == "auto" and not options.residency_if_needed
    if is_given and options.params_on_host is None and is_on_host:
        yield "the host", replace(options, residency="cuda")
    fewer = {f"{AUTO}:3": AUTO, AUTO: f"{AUTO}:2"}.get(options.mesh)
    is_fine = any(len(each.mesh.sizes) > 2 for each in requests)
    if fewer is not None and (is_fine or (is_staged and fewer == AUTO)):
        yield "a mesh of three axes", replace(options, mesh=fewer)
