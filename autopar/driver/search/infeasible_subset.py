"""What is imposed on a plan, over all meshes: where it makes sense, and which of it conflicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations

from autopar.errors import InfeasibleError, UnsuitedMeshError
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes
from autopar.plans.requests.request import GraphRequest, PlanRequest

MEMORY_LIMIT = "memory limit"
BOUNDLESS_BYTES = 1 << 60
"""More than any device has."""

MAX_PROBES = 64
"""How many sets are tried for one that is smaller than what leaving out one by one ends in."""


def smallest_infeasible_subset(
    limits: Sequence[str], possible: Callable[[Collection[str]], bool]
) -> tuple[str, ...]:
    """A set of `limits`, in their order, that is not `possible`, while it is without any one of
    them; of all such sets one of the smallest, unless that takes more than `MAX_PROBES` to prove.
    `limits` together must be impossible.

    What is possible stays so with less: subsets of what was found possible are not tried.
    """
    known: list[frozenset[str]] = []

    def fits(origins: frozenset[str]) -> bool:
        if any(origins <= other for other in known):
            return True
        if possible(origins):
            known.append(origins)
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


def suited(graph_request: GraphRequest, meshes: Sequence[Mesh]) -> tuple[PlanRequest, ...]:
    """What is asked, on each of `meshes` on which all of it makes sense. UnsuitedMeshError if none
    is left."""
    found: list[PlanRequest] = []
    refused: list[UnsuitedMeshError] = []
    for mesh in meshes:
        try:
            found.append(graph_request.on(mesh))
        except UnsuitedMeshError as error:
            refused.append(error)
    if not found:
        tried = ", ".join(str(mesh) for mesh in meshes)
        others = f" (of the meshes tried, {tried}, none is suited)" if len(meshes) > 1 else ""
        raise type(refused[-1])(f"{refused[-1]}{others}")
    return tuple(found)


Attempt = Callable[[PlanRequest, bool], InfeasibleError | None]
"""Says why there is no plan as it is wanted, None if there is one. Where it does not solve, which
it is told, it says only what leaves something without any choice."""


def explain_infeasible(request: PlanRequest, attempt: Attempt) -> InfeasibleError:
    """Why there is no plan as it is wanted: the smallest set of what is imposed, and of the memory
    limit, that conflicts. Nothing is solved where that is told by the choices that are left."""
    solves = attempt(request, False) is None
    asked = request.options.imposed
    limits = (*asked, MEMORY_LIMIT) if solves else asked

    def failure(origins: Collection[str]) -> InfeasibleError | None:
        reduced = request if MEMORY_LIMIT in origins else request.within(BOUNDLESS_BYTES)
        return attempt(reduced.with_only(origins), solves)

    named = smallest_infeasible_subset(limits, lambda kept: failure(kept) is None)
    why = failure(named)
    if why is None:
        return InfeasibleError("no plan meets the limits")
    if not {*named} - {MEMORY_LIMIT} or str(why).startswith(f"{named[0]}: "):
        return why
    given = request.options.memory_limit_bytes
    size = f" {format_bytes(given)}" if given else " of the device"
    listed = "; ".join(limit + size if limit == MEMORY_LIMIT else limit for limit in named)
    if len(named) == 1:
        return InfeasibleError(f"{listed} leaves no plan: {why}")
    return InfeasibleError(
        f"{len(named)} limits conflict, and would not without any one of them: {listed}. Together: "
        f"{why}"
    )
