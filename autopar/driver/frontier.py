"""Time against memory: the best plans within a ladder of memory limits.

A plan that is within a limit is within every larger one. All plans that are found on the way are
therefore at hand for all limits, so that more memory never comes with a longer step, though the
search is not exact where temporaries are large. Each mesh states the problem that is open about
what backward makes again once; only the limit differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import pairwise

import msgspec

from autopar.compile import Say, best_on
from autopar.cost_model.price import price
from autopar.driver.chunk_counts import chunk_count, chunk_ladder
from autopar.driver.infeasible_subset import BOUNDLESS_BYTES
from autopar.driver.leanest import leanest
from autopar.driver.microbatching import possible_counts
from autopar.driver.search import Tried, explaining, planned, survey
from autopar.errors import InfeasibleError
from autopar.ir.problem import Problem
from autopar.ir.units import format_bytes
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.frontier import Frontier, FrontierPoint
from autopar.plans.plan import PROVEN, Plan
from autopar.plans.request import Asked, PlanRequest

NUM_LIMITS = 8
"""Of a ladder, unless limits are given."""


def find_frontier(asked: Asked, limits: Sequence[int], say: Say) -> Frontier:
    """The best plans within each of `limits`, in bytes per device, descending; of none, within a
    ladder of them, from the peak of the best plan of all down to that of the leanest one, each plan
    once. The limit that is asked for, or else the memory of a device, is among them if it lies
    between.

    Errors are those of `search.search`, but no limit is too small: its point has no plan.
    """
    own = asked.options.memory_limit_bytes or asked.cluster.device.memory_bytes
    boundless = replace(asked.options, memory_limit_bytes=BOUNDLESS_BYTES)
    asked = replace(asked, options=boundless)
    with explaining(asked, say):
        first = survey(asked, say)
    meshes = [_OnMesh(asked.on(tried.mesh), tried) for tried in first.tried]
    if asked.options.microbatches is None:
        counts = possible_counts(asked.graph)[1:]
        meshes += [
            _OnMesh(replace(mesh.request, microbatches=count), Tried(mesh.request.mesh, 0, None))
            for mesh in meshes
            for count in counts
        ]
    if asked.options.loss_chunks is None:
        least = min(limits) if limits else min(own, _peak(first.best))
        meshes += [
            _OnMesh(replace(mesh.request, loss_chunks=count), Tried(mesh.request.mesh, 0, None))
            for mesh in meshes
            for count in _chunk_counts(mesh.request, own, least)
        ]
    top = _search(meshes, BOUNDLESS_BYTES, _counted(say, "without a limit"))
    bounds = _given(meshes, limits, say) if limits else _ladder(meshes, own, say)
    found = sorted(_all(meshes), key=_order)

    def best(limit: int, bound: int) -> Plan | None:
        chosen = next((c for c in found if _peak(c) <= limit), None)
        if chosen is None:
            return None
        estimates = msgspec.structs.replace(chosen.estimates, memory_limit=limit)
        solution = bounded(chosen.solution, bound)
        chosen = replace(chosen, estimates=estimates, solution=solution)
        return planned(replace(first, best=chosen))

    unlimited = best(_peak(found[0]), top)
    assert unlimited is not None
    points = [FrontierPoint(limit, best(limit, bound)) for limit, bound in bounds.items()]
    if not limits:
        alike = [_digest(a) == _digest(b) and a.limit_bytes != own for a, b in pairwise(points)]
        points = [p for p, again in zip(points, [*alike, False], strict=True) if not again]
    return Frontier(own, unlimited, min(map(_peak, found)), tuple(points))


def _chunk_counts(request: PlanRequest, own: int, least: int) -> list[int]:
    """Of the loss, those that are tried within the `least` limit, and the most of the `own`."""
    found = {*chunk_ladder(request.within(least)), chunk_count(request.within(own))}
    return sorted(found - {1})


def _digest(point: FrontierPoint) -> str:
    return point.plan.digest if point.plan is not None else ""


def _given(meshes: Sequence[_OnMesh], limits: Sequence[int], say: Say) -> dict[int, int]:
    """Per limit, which are descending, what no plan within it beats; the plans are in `meshes`. If
    one is too small, so is the leanest plan."""
    bounds = {
        limit: _search(meshes, limit, _counted(say, f"limit {k} of {len(limits)}"))
        for k, limit in enumerate(limits, 1)
    }
    if min(map(_peak, _all(meshes))) > min(limits):
        _find_leanest(meshes, say)
    return bounds


def _find_leanest(meshes: Sequence[_OnMesh], say: Say) -> None:
    for mesh in meshes:
        mesh.find_leanest(_counted(say, "the least memory"))


def _ladder(meshes: Sequence[_OnMesh], own: int, say: Say) -> dict[int, int]:
    """The same of a ladder of limits, each such a part of the last plan's peak that equal parts
    lead to the leanest plan; and of `own` where it lies between."""
    _find_leanest(meshes, say)
    least = min(map(_peak, _all(meshes)))
    limit = _peak(min(_all(meshes), key=_order))
    bounds = dict[int, int]()
    for left in reversed(range(NUM_LIMITS)):
        told = _counted(say, f"limit {NUM_LIMITS - left} of {NUM_LIMITS}")
        bounds[limit] = _search(meshes, limit, told)
        within = (found for found in _all(meshes) if _peak(found) <= limit)
        peak = _peak(min(within, key=_order))
        if not left or peak == least:
            break
        limit = round(peak * (least / peak) ** (1 / left))
        if limit < own < peak:
            bounds[own] = _search(meshes, own, told)
    return bounds


@dataclass(slots=True)
class _OnMesh:
    """What is known of one mesh, number of microbatches and of chunks of the loss: plans `found` on
    it, the `latest` that a search within a limit came to, and that none within that takes less than
    `bound` nanoseconds as modelled. It `is_exhausted` once a limit was too small for any plan."""

    request: PlanRequest
    tried: InitVar[Tried]
    found: list[Candidate] = field(default_factory=list[Candidate])
    latest: Candidate | None = None
    bound: int = 0
    is_exhausted: bool = False
    stated: Problem | None = None

    def __post_init__(self, tried: Tried) -> None:
        self.found += [tried.found] if tried.found is not None else []
        if self.request.options.fuses(self.request.cluster.device):
            # Of the same plans: what is made again was open.
            self.latest, self.bound = tried.found, tried.bound

    @property
    def name(self) -> str:
        mesh, count = f"mesh {self.request.mesh or 'of one device'}", self.request.microbatches
        chunks = self.request.loss_chunks
        turns = f" in {count} microbatches" if count > 1 else ""
        return mesh + turns + (f", the loss in {chunks} chunks" if chunks > 1 else "")

    def find_leanest(self, say: Say) -> None:
        """Finds the best of the plans that hold least when forward ends."""
        say(f"{self.name}: solving")
        self.found.append(leanest(self.request, say, self._stated()))

    def find_within(self, limit: int, cutoff: int | None, say: Say) -> None:
        """Finds the best plan within `limit`, which is below those tried before, if there is one
        that takes less than `cutoff`."""
        self.latest, allowance = None, limit if limit < BOUNDLESS_BYTES else None
        say(f"{self.name}: solving" + (f" within {format_bytes(allowance)}" if allowance else ""))
        try:
            self.latest = self._solved(limit, allowance, say, cutoff)
        except InfeasibleError:
            self.is_exhausted = True
        except Beaten as beaten:
            self.bound = max(self.bound, beaten.bound)
        else:
            self.bound = max(self.bound, self.latest.solution.bound)
            self.found.append(self.latest)

    def may_gain(self, limit: int, known: int | None) -> bool:
        """Whether a search within `limit` may find a plan that takes less than `known`, by more
        than plans are proven to."""
        if self.latest is not None and _peak(self.latest) <= limit:
            return False
        return not self.is_exhausted and (known is None or self.bound < known * (1 - PROVEN))

    def _solved(
        self, limit: int, allowance: int | None, say: Say, cutoff: int | None = None
    ) -> Candidate:
        request = self.request.opened().within(limit)
        stated = replace(self._stated(), usage_limit=allowance)
        return best_on(request, say, cutoff, stated, after=self.found[-1] if self.found else None)

    def _stated(self) -> Problem:
        """The problem that is open about what is made again."""
        if self.stated is None:
            self.stated = price(self.request.opened())
        return self.stated


def _search(meshes: Sequence[_OnMesh], limit: int, say: Say) -> int:
    """Adds to the meshes what is best within `limit`, where that is not at hand, and returns what
    no plan within it beats."""
    for mesh in meshes:
        steps = [c.solution.objective for c in _all(meshes) if _peak(c) <= limit]
        known = min(steps, default=None)
        if mesh.may_gain(limit, known):
            # Alone, a mesh spares itself the bound that a cutoff is compared with first.
            mesh.find_within(limit, known if len(meshes) > 1 else None, say)
    return min(mesh.bound for mesh in meshes)


def _all(meshes: Sequence[_OnMesh]) -> Iterator[Candidate]:
    return (found for mesh in meshes for found in mesh.found)


def _order(found: Candidate) -> tuple[int, int, int]:
    """The better the lower: by the step as it is played, of which what the solver makes least of is
    a model."""
    return found.estimates.step_ns, found.solution.objective, _peak(found)


def _counted(say: Say, where: str) -> Say:
    return lambda text: say(f"{where}: {text}")


def _peak(found: Candidate) -> int:
    return found.estimates.memory.total
