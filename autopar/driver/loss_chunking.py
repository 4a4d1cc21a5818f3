"""Whether a plan works on its loss in chunks, and in how many, where that is open."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.compile import Say, best_on
from autopar.errors import InfeasibleError
from autopar.ir.graph import itemsize
from autopar.ir.heads import Head, heads_of
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.request import PlanRequest

_WORTH = 32
"""Chunks are tried where what is made of the scores is at least this part of a device's memory."""
_CHUNK = 64
"""A chunk is made no smaller than this part of the memory, nor than so many rows: below, products
take longer."""
_ROWS = 256


def best_in_chunks(request: PlanRequest, say: Say, cutoff: int | None = None) -> Candidate:
    """`compile.best_on`, with the loss whole and in chunks where that is open and memory binds:
    chunks take less memory, and more time where scores are made twice."""
    chunks = chunk_count(request) if request.options.loss_chunks is None else 1
    if chunks == 1:
        return best_on(request, say, cutoff)
    whole: Candidate | None = None
    bounds: list[int] = []
    try:
        whole = best_on(request, say, cutoff)
    except InfeasibleError as error:
        say(f"{request.mesh}: {error}")
    except Beaten as beaten:
        if not beaten.is_tight:
            raise
        bounds.append(beaten.bound)
    if whole is not None:
        if not whole.is_tight:
            return whole
        cutoff = whole.solution.objective
        bounds.append(whole.solution.bound)
    say(f"{request.mesh}: with the loss in {chunks} chunks")
    found: Candidate | None = None
    try:
        found = best_on(replace(request, loss_chunks=chunks), say, cutoff)
        bounds.append(found.solution.bound)
    except InfeasibleError:
        if not bounds:
            raise
    except Beaten as beaten:
        bounds.append(beaten.bound)
    best = found
    if whole is not None and (found is None or found.solution.objective >= cutoff):
        best = whole
    if best is None:
        raise Beaten(request.mesh, min(bounds), is_tight=True)
    return replace(best, solution=bounded(best.solution, min(bounds)))


def leaner(request: PlanRequest) -> PlanRequest:
    """The same with the loss in chunks where that is open and saves memory."""
    is_open = request.options.loss_chunks is None
    return replace(request, loss_chunks=chunk_count(request)) if is_open else request


def chunk_count(request: PlanRequest) -> int:
    """In how many chunks a loss would be worked on, a power of two; 1 where that saves little."""
    heads, limit = heads_of(request.graph), request.memory_limit_bytes
    parts = request.cluster.num_devices * request.microbatches
    made = sum(_scores(head) * _made_bytes(head) for head in heads) // parts
    if not made * _WORTH >= limit > 0 or not heads:
        return 1
    largest = max(_scores(head) * (_made_bytes(head)) for head in heads) // parts
    rows = max(head.product.outputs[0].shape[0] for head in heads) // parts
    count = 2
    while largest // count * _CHUNK > limit and rows // count > _ROWS:
        count *= 2
    return count


def _scores(head: Head) -> int:
    return prod(head.product.outputs[0].shape)


def _made_bytes(head: Head) -> int:
    """Bytes per score of the score and what the loss makes of it."""
    return itemsize(head.product.outputs[0].dtype) + itemsize(head.loss.outputs[0].dtype)
