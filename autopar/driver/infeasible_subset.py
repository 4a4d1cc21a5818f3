"""What is imposed on a plan, over all meshes: where it makes sense, how a plan records it, and
which of it conflicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from autopar.errors import InfeasibleError, UnsuitedMeshError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes
from autopar.plans.demands import on_mesh
from autopar.plans.options import Options

MEMORY_LIMIT = "memory limit"
BOUNDLESS_BYTES = 1 << 60
"""More than any device has."""

MAX_PROBES = 64
"""How many sets are tried for one that is smaller than what leaving out one by one ends in."""


def smallest_conflict(
    limits: Sequence[str], possible: Callable[[Collection[str]], bool]
) -> tuple[str, ...]:
    """A set of `limits`, in their order, that is not `possible`, while it is without any one of
    them; of all such sets one of the smallest, unless that takes more than `MAX_PROBES` to prove.
    `limits` together must be impossible.

    What is possible stays so with less: subsets of what was found possible are not tried.
    """
    known: list[frozenset[str]] = []

    def fits(kept: frozenset[str]) -> bool:
        if any(kept <= other for other in known):
            return True
        if possible(kept):
            known.append(kept)
            return True
        return False

    needed = frozenset(limits)
    for limit in limits:
        if not fits(needed - {limit}):
            needed -= {limit}
    probes = 0
    for size in range(len(needed)):
        for some in combinations(limits, size):
            probes += all(not set(some) <= other for other in known)
            if probes > MAX_PROBES:
                break
            if not fits(frozenset(some)):
                return some
    return tuple(limit for limit in limits if limit in needed)


def suited(graph: Graph, meshes: Sequence[Mesh], options: Options) -> tuple[Mesh, ...]:
    """The `meshes` on which all that is imposed makes sense. UnsuitedMeshError if none is left."""
    found: list[Mesh] = []
    refused: list[UnsuitedMeshError] = []
    for mesh in meshes:
        try:
            for constraint in options.imposed(graph, mesh):
                on_mesh(constraint, mesh)
        except UnsuitedMeshError as error:
            refused.append(error)
        else:
            found.append(mesh)
    if not found:
        tried = ", ".join(str(mesh) for mesh in meshes)
        others = f" (of the meshes tried, {tried}, none is suited)" if len(meshes) > 1 else ""
        raise UnsuitedMeshError(f"{refused[-1]}{others}")
    return tuple(found)


def describe_imposed(graph: Graph, mesh: Mesh, options: Options) -> tuple[str, ...]:
    """What the user asked for, as a plan for `mesh` records it: a strategy with what it came to."""
    lines = [
        f"{constraint.origin}: {constraint}"
        for constraint in options.imposed(graph, mesh)
        if constraint.origin not in options.asked[: len(options.asked) - bool(options.strategy)]
    ]
    return (*options.asked, *lines)


class Attempt(Protocol):
    """Says why there is no plan with some options, None if there is one. Where it does not solve,
    it tells only what leaves something without any choice."""

    def __call__(self, options: Options, /, *, solves: bool) -> InfeasibleError | None: ...


def explain(options: Options, attempt: Attempt) -> InfeasibleError:
    """Why there is no plan with `options`: the smallest set of what is imposed, and of the memory
    limit, that conflicts. Nothing is solved where that is told by the choices that are left."""
    solves = attempt(options, solves=False) is None
    limits = (*options.asked, MEMORY_LIMIT) if solves else options.asked

    def failure(kept: Collection[str]) -> InfeasibleError | None:
        unlimited = replace(options, memory_limit_bytes=BOUNDLESS_BYTES)
        reduced = options if MEMORY_LIMIT in kept else unlimited
        return attempt(reduced.with_only(kept), solves=solves)

    named = smallest_conflict(limits, lambda kept: failure(kept) is None)
    why = failure(named)
    if why is None:
        return InfeasibleError("no plan meets the limits")
    if not {*named} - {MEMORY_LIMIT} or str(why).startswith(f"{named[0]}: "):
        return why
    given = options.memory_limit_bytes
    size = f" {format_bytes(given)}" if given else " of the device"
    listed = "; ".join(limit + size if limit == MEMORY_LIMIT else limit for limit in named)
    if len(named) == 1:
        return InfeasibleError(f"{listed} leaves no plan: {why}")
    return InfeasibleError(
        f"{len(named)} limits conflict, and would not without any one of them: {listed}. Together: "
        f"{why}"
    )
