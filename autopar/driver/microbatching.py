"""How many microbatches a plan has, where that is open."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from autopar.compile import Say, best_on, check_least
from autopar.driver.chunk_counts import chunk_ladder, most_saved_bytes
from autopar.errors import InfeasibleError, MicrobatchError, NotImposedWarning
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph
from autopar.ir.microbatches import in_microbatches, trains
from autopar.ir.problem import Solution
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.options import Options
from autopar.plans.request import PlanRequest


@dataclass(frozen=True, slots=True)
class InTurns:
    """The `best` plan over numbers of microbatches, and the best of `each` number."""

    best: Candidate
    each: Mapping[int, Candidate]


def best_in_turns(
    request: PlanRequest,
    say: Say,
    cutoff: int | None = None,
    *,
    after: Candidate | None = None,
    whole: InTurns | None = None,
    chunked: bool = False,
) -> InTurns:
    """`compile.best_on`, over all numbers of microbatches that are asked for: powers of two, where
    that is open, for as long as memory binds and each is better than the one before. More of them
    take less memory and never less time. If `chunked`, the loss is in chunks, as many as are best
    of a ladder (`chunk_counts`), for as long as that saves memory, and may be worth it beside the
    plans with the `whole` loss. The first is found from the one `after` which it comes, in which
    memory binds, and each from the one before."""
    each: dict[int, Candidate] = {}
    best: Candidate | None = None
    bounds: list[int] = []
    failure: InfeasibleError | None = None
    is_tight = False
    for count in _counts(request):
        here = replace(request, microbatches=count)
        ladder = chunk_ladder(here) if chunked else (here.loss_chunks,)
        if not ladder:
            break
        if count > 1:
            say(f"{request.mesh}: in {count} microbatches")
        try:
            if failure is not None and best is None:
                check_least(replace(here, loss_chunks=ladder[-1]))
            least = cutoff if best is None else cutoff_after(best)
            if least is not None and whole is not None and count in whole.each:
                _check_worth(here, whole.each[count].solution, least)
            found = _best_of(here, ladder, say, least, best or after)
            each[count] = found
        except InfeasibleError as error:
            failure = failure or error
            continue
        except Beaten as beaten:
            bounds.append(beaten.bound)
            is_tight = beaten.is_tight
            if best is not None or not beaten.is_tight:
                break
            continue
        bounds.append(found.solution.bound)
        if best is None or found.solution.objective < best.solution.objective:
            best = found
        if best is not found or not found.is_tight:
            break
    if best is not None:
        return InTurns(replace(best, solution=bounded(best.solution, min(bounds))), each)
    if bounds:
        raise Beaten(request.mesh, min(bounds), is_tight=is_tight)
    assert failure is not None
    raise failure


def _check_worth(request: PlanRequest, whole: Solution, least: int) -> None:
    """Beaten if a plan with the loss in chunks is not thought to take less than `least`: beside one
    with the `whole` loss it saves no more than the memory that is free then is worth."""
    if whole.byte_ns is not None:
        saved_ns = ceil(whole.byte_ns * most_saved_bytes(request))
        if whole.objective - saved_ns >= least:
            raise Beaten(request.mesh, max(0, whole.bound - saved_ns), is_tight=True)


def _best_of(
    request: PlanRequest,
    ladder: Sequence[int],
    say: Say,
    cutoff: int | None,
    after: Candidate | None,
) -> Candidate:
    """`compile.best_on` over a `ladder` of numbers of chunks, few first, for as long as memory
    binds and each is better than the one before, from which it is found, as the first from the one
    `after` which it comes. What it proves is of those that were tried."""
    if len(ladder) == 1:
        return best_on(replace(request, loss_chunks=ladder[0]), say, cutoff, after=after)
    best: Candidate | None = None
    bounds: list[int] = []
    failure: InfeasibleError | None = None
    is_tight = False
    for chunks in ladder:
        say(f"{request.mesh}: in {chunks} chunks")
        least = cutoff if best is None else cutoff_after(best)
        try:
            here = replace(request, loss_chunks=chunks)
            if failure is not None and best is None:
                check_least(here)
            found = best_on(here, say, least, after=best or after)
        except InfeasibleError as error:
            failure = error
            continue
        except Beaten as beaten:
            bounds.append(beaten.bound)
            is_tight = beaten.is_tight
            if best is not None or not is_tight:
                break
            continue
        bounds.append(found.solution.bound)
        if best is not None and found.solution.objective >= best.solution.objective:
            break
        best = found
        if not found.is_tight:
            break
    if best is not None:
        return replace(best, solution=bounded(best.solution, min(bounds)))
    if bounds:
        raise Beaten(request.mesh, min(bounds), is_tight=is_tight)
    assert failure is not None
    raise failure


def cutoff_after(found: Candidate) -> int:
    """What a plan of another form has to take less than, where one is `found`."""
    return int(found.solution.objective * (1 - found.request.tolerance))


def _counts(request: PlanRequest) -> Sequence[int]:
    is_open = request.options.microbatches is None
    return possible_counts(request.graph) if is_open else (request.microbatches,)


def dividing(options: Options, graph: Graph) -> Options:
    """`options` for another call of a model that was planned with them: in as many microbatches as
    divide its batch, or as many as are best where it cannot be divided at all, which is told."""
    asked = options.microbatches
    if asked is None or not (trains(graph) or options.is_staged):
        return options
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    count = next(n for n in range(asked, 0, -1) if all(size % n == 0 for size in sizes))
    try:
        in_microbatches(graph, count)
    except MicrobatchError as error:
        warnings.warn(NotImposedWarning(f"microbatches={asked}: {error}"), stacklevel=2)
        return replace(options, microbatches=None)
    return replace(options, microbatches=count)


def possible_counts(graph: Graph) -> tuple[int, ...]:
    """The powers of two that divide the batch, if the step can be taken in parts at all."""
    sizes = [graph.atoms[atom].size for atom in sorted(batch_atoms(graph))]
    found = [1]
    while trains(graph) and sizes and all(size % (2 * found[-1]) == 0 for size in sizes):
        found.append(2 * found[-1])
    try:
        in_microbatches(graph, min(2, found[-1]))
    except MicrobatchError:
        return (1,)
    return tuple(found)
