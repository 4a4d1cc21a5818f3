"""Constraints over all meshes: on which meshes they make sense, and which of them conflict."""

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
"""How many sets are tried to find one that is smaller than leaving out one by one leads to."""


def smallest_infeasible_subset(
    limits: Sequence[str], possible: Callable[[Collection[str]], bool]
) -> tuple[str, ...]:
    """A set of `limits`, in their order, that is not `possible`, while it is without any one of
    them. It is one of the smallest such sets, unless that takes more than `MAX_PROBES` to prove.
    `limits` together must be impossible.

    A subset of a possible set is possible, and is not tried.
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
    """The request on each of `meshes` that suits all of its constraints. UnsuitedMeshError if none
    is left."""
    requests: list[PlanRequest] = []
    refused: list[UnsuitedMeshError] = []
    for mesh in meshes:
        try:
            requests.append(graph_request.on(mesh))
        except UnsuitedMeshError as error:
            refused.append(error)
    if not requests:
        tried = ", ".join(str(mesh) for mesh in meshes)
        others = f" (of the meshes tried, {tried}, none is suited)" if len(meshes) > 1 else ""
        raise type(refused[-1])(f"{refused[-1]}{others}")
    return tuple(requests)


Attempt = Callable[[PlanRequest, bool], InfeasibleError | None]
"""Why there is no plan for a request, None if there is one. Without solving, which is the second
argument, only what leaves a node without any choice counts."""


def explain_infeasible(request: PlanRequest, attempt: Attempt) -> InfeasibleError:
    """Why there is no plan for a request: the smallest set of constraints and the memory limit that
    conflicts. Nothing is solved if the choices that are left tell that already."""
    solves = attempt(request, False) is None
    imposed = request.options.imposed
    limits = (*imposed, MEMORY_LIMIT) if solves else imposed

    def failure(origins: Collection[str]) -> InfeasibleError | None:
        reduced = request if MEMORY_LIMIT in origins else request.within(BOUNDLESS_BYTES)
        return attempt(reduced.with_only(origins), solves)

    named = smallest_infeasible_subset(limits, lambda origins: failure(origins) is None)
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
