"""To ask for more never gives a longer step.

Plans are chosen by the step as modelled, and predicted by the step as simulated: what only widens a
search finds one that is as good or better as modelled, and may be longer as simulated. So where a
plan makes use of what was left open, the best one is found without that too, and the shorter of the
two is taken. Then the predicted step is never longer than that of a narrower request. Proof, by
induction over what is left open: if the plan is one of the narrower request as well, it is the best
of that too, and what is compared with it is no less; if it is not, something that it makes use of
is not open there, and what was found without that is no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.driver.finding import Finding
from autopar.driver.incumbent import CandidateSearch, Trail
from autopar.errors import SolverError
from autopar.plans.options import AUTO, Options
from autopar.plans.request import Asked


def findings(trail: Trail) -> CandidateSearch[Finding]:
    """A search for the shortest step, as it is simulated."""
    return CandidateSearch(trail, cost_ns=lambda found: found.step_ns)


def with_narrower(
    find: Callable[[Asked, Trail], Finding],
    asked: Asked,
    trail: Trail,
    known: Finding | None = None,
) -> Finding:
    """What is found for what is asked, or without something that is left open, whichever has the
    shorter step; `known`, if `find` finds nothing better. Errors are those of `find`."""
    search, found = findings(trail), find(asked, trail)
    if found is known:
        return found
    search.offer(found)
    for what, options in _narrower(asked.options, found):
        trail(f"{what}: looking for the best plan without")
        narrower = replace(asked, options=options)
        try:
            search.attempt(lambda _, narrower=narrower: with_narrower(find, narrower, trail, known))
        except SolverError as error:
            # There is a plan: that of a narrower request, which takes too long, is not needed.
            trail(f"{error}")
    best = search.result()
    if best is found or best is known:
        return best
    # What is known of all plans is known beside it as well.
    others = (*best.others, *found.beside)
    return replace(best.proven(min(best.bound_ns, found.bound_ns)), others=others)


def _narrower(options: Options, found: Finding) -> Iterator[tuple[str, Options]]:
    """What is left open that a plan makes use of, and the options without that."""
    requests = [stage.request for stage in found.stages]
    # What is open also changes which pipelines are planned.
    is_staged = len(requests) > 1
    if options.loss_chunks is None and any(each.loss_chunks > 1 for each in requests):
        yield "chunks of the loss", replace(options, loss_chunks=1)
    if options.microbatches is None and len(requests) == 1 and found.microbatches > 1:
        yield "microbatches", replace(options, microbatches=1)
    is_hosted = is_staged or any(each.hosted for each in requests)
    if options.residency == "auto" and options.hosted is None and is_hosted:
        yield "the host", replace(options, residency="cuda")
    fewer = {f"{AUTO}:3": AUTO, AUTO: f"{AUTO}:2"}.get(options.mesh)
    is_fine = any(len(each.mesh.sizes) > 2 for each in requests)
    if fewer is not None and (is_fine or (is_staged and fewer == AUTO)):
        yield "a mesh of three axes", replace(options, mesh=fewer)
