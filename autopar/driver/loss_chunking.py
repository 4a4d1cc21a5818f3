"""Whether a plan works on its loss in chunks, where that is open."""

from __future__ import annotations

from dataclasses import replace

from autopar.compile import Say
from autopar.driver.chunk_counts import in_chunks
from autopar.driver.microbatching import InTurns, best_in_turns, cutoff_after
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
        return best_in_turns(request, say, cutoff, after=after).best
    turns: InTurns | None = None
    bounds: list[int] = []
    try:
        turns = best_in_turns(request, say, cutoff, after=after)
    except InfeasibleError as error:
        say(f"{request.mesh}: {error}")
    except Beaten as beaten:
        if not beaten.is_tight:
            raise
        bounds.append(beaten.bound)
    whole = turns.best if turns is not None else None
    if whole is not None:
        if not whole.is_tight:
            return whole
        cutoff = cutoff_after(whole)
        bounds.append(whole.solution.bound)
    best = _in_chunks(request, say, cutoff, bounds, turns) or whole
    if best is None:
        raise Beaten(request.mesh, min(bounds), is_tight=True)
    return replace(best, solution=bounded(best.solution, min(bounds)))


def _in_chunks(
    request: PlanRequest,
    say: Say,
    cutoff: int | None,
    bounds: list[int],
    whole: InTurns | None,
) -> Candidate | None:
    """The best plan with the loss in chunks, if it takes less than `cutoff`; what no such plan
    beats is added to the `bounds` of others. It is found from those of the `whole` loss, if there
    are any. InfeasibleError if none fits, and there are no others."""
    say(f"{request.mesh}: with the loss in chunks")
    after = None if whole is None else whole.best
    try:
        found = best_in_turns(request, say, cutoff, after=after, whole=whole, chunked=True).best
    except InfeasibleError:
        if not bounds:
            raise
        return None
    except Beaten as beaten:
        bounds.append(beaten.bound)
        return None
    bounds.append(found.solution.bound)
    return found if cutoff is None or found.solution.objective < cutoff else None
