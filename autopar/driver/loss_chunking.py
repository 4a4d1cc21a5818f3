"""Whether a plan works on its loss in chunks, where that is open."""

from __future__ import annotations

from dataclasses import replace

from autopar.compile import Say
from autopar.driver.chunk_counts import in_chunks
from autopar.driver.microbatching import best_in_turns, cutoff_after
from autopar.errors import InfeasibleError
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.request import PlanRequest


def best_in_chunks(
    request: PlanRequest,
    say: Say,
    cutoff: int | None = None,
    *,
    after: Candidate | None = None,
) -> Candidate:
    """`best_in_turns`, with the loss whole, and in chunks as well if memory binds then: chunks take
    less memory, and more time where scores are made twice. InfeasibleError if neither fits."""
    if in_chunks(request).loss_chunks == request.loss_chunks:
        return best_in_turns(request, say, cutoff, after=after)
    whole: Candidate | None = None
    bounds: list[int] = []
    try:
        whole = best_in_turns(request, say, cutoff, after=after)
    except InfeasibleError as error:
        say(f"{request.mesh}: {error}")
    except Beaten as beaten:
        if not beaten.is_tight:
            raise
        bounds.append(beaten.bound)
    if whole is not None:
        if not whole.is_tight:
            return whole
        cutoff = cutoff_after(whole)
        bounds.append(whole.solution.bound)
    best = _in_chunks(request, say, cutoff, bounds, whole) or whole
    if best is None:
        raise Beaten(request.mesh, min(bounds), is_tight=True)
    return replace(best, solution=bounded(best.solution, min(bounds)))


def _in_chunks(
    request: PlanRequest,
    say: Say,
    cutoff: int | None,
    bounds: list[int],
    whole: Candidate | None,
) -> Candidate | None:
    """The best plan with the loss in chunks, if it takes less than `cutoff`; what no such plan
    beats is added to the `bounds` of others. It is found from that of the `whole` loss, if there is
    one. InfeasibleError if none fits, and there are no others."""
    say(f"{request.mesh}: with the loss in chunks")
    try:
        found = best_in_turns(request, say, cutoff, chunked=True, after=whole)
    except InfeasibleError:
        if not bounds:
            raise
        return None
    except Beaten as beaten:
        bounds.append(beaten.bound)
        return None
    bounds.append(found.solution.bound)
    return found if cutoff is None or found.solution.objective < cutoff else None
