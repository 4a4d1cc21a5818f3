"""Time against memory: the best plans within a ladder of memory limits.

A plan that is within a limit is within every larger one. All plans that are found on the way are
therefore at hand for all limits, so that more memory never comes with a longer step, though the
search is not exact where temporaries are large. Each mesh states the problem that is open about
what backward recomputes once; only the limit differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autopar.compile import Say, best_on
from autopar.cost_model.price import price
from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import REFUSALS, Trail
from autopar.driver.search.infeasible_subset import BOUNDLESS_BYTES
from autopar.driver.search.margin import find_margin
from autopar.driver.search.meshes import explaining, in_one_stage, survey
from autopar.driver.search.open_counts import chunk_count, chunk_ladder, possible_counts
from autopar.driver.search.shortage import smallest_memory
from autopar.driver.search.stages_if_needed import best_of_all
from autopar.errors import InfeasibleError
from autopar.ir.problem import Problem
from autopar.ir.units import format_bytes
from autopar.plans.frontier import Frontier, FrontierPoint
from autopar.plans.memory_refinement import Beaten, Candidate
from autopar.plans.plan import Plan
from autopar.plans.provenance import PROVEN
from autopar.plans.requests.request import GraphRequest, PlanRequest

NUM_LIMITS = 8
"""Of a ladder, unless limits are given."""

_SMALLEST_MEMORY_TRIES = 6
"""How many limits are tried for the least memory of plans in stages: to a 64th of the most."""


def find_frontier(graph_request: GraphRequest, limits: Sequence[int], say: Say) -> Frontier:
    """The best plans within each of `limits`, in bytes per device, descending; of none, within a
    ladder of them, from the peak of the best plan of all down to that of the leanest one, each plan
    once. The limit that is asked for, or else the memory of a device, is among them if it lies
    between.

    Errors are those of `planning.answer`, but no limit is too small: its point has no plan.
    """
    own = graph_request.options.memory_limit_bytes or graph_request.cluster.device.memory_bytes
    boundless = replace(graph_request.options, memory_limit_bytes=BOUNDLESS_BYTES)
    graph_request, trail = replace(graph_request, options=boundless), Trail(say)
    found = (
        _InStages(graph_request, trail)
        if graph_request.options.is_staged
        else _InOne(graph_request, own, limits, trail)
    )
    top = found.search(BOUNDLESS_BYTES, _counted(say, "without a limit"))
    known = _given(found, limits, say) if limits else _ladder(found, own, say)
    best, *more = sorted(found.plans(), key=_order)
    points: list[FrontierPoint] = []
    for limit, others in known.items():
        chosen = next((each for each in (best, *more) if each.peak_bytes <= limit), None)
        plan = None if chosen is None else _plan(chosen, limit, others, trail)
        points.append(FrontierPoint(limit, plan))
    if not limits:
        alike = [_digest(a) == _digest(b) and a.limit_bytes != own for a, b in pairwise(points)]
        points = [p for p, again in zip(points, [*alike, False], strict=True) if not again]
    least = min(each.peak_bytes for each in (best, *more))
    return Frontier(own, _plan(best, best.peak_bytes, top, trail), least, tuple(points))


def _plan(chosen: Finding, limit: int, others: Sequence[Other], trail: Trail) -> Plan:
    """The plan that is the best within a limit, beside the `others` within it, with its margin if
    that is asked for."""
    fitting = [
        each if each.finding and each.finding.peak_bytes <= limit else replace(each, finding=None)
        for each in others
    ]
    bound_ns = min((each.bound_ns for each in others), default=chosen.bound_ns)
    found = replace(chosen.within(limit), others=(*chosen.others, *fitting)).proven(bound_ns)
    margin = find_margin(found, trail) if found.graph_request.options.given.search.margin else None
    return found.plan(margin, trail.outcomes)


def _chunk_counts(request: PlanRequest, own: int, least: int) -> list[int]:
    """Of the loss, those that are tried within the `least` limit, and the most of the `own`."""
    found = {*chunk_ladder(request.within(least)), chunk_count(request.within(own))}
    return sorted(found - {1})


def _digest(point: FrontierPoint) -> str:
    return point.plan.digest if point.plan is not None else ""


def _given(known: _Known, limits: Sequence[int], say: Say) -> dict[int, Sequence[Other]]:
    """Per limit, which are descending, what is known of the candidates within it. If one is too
    small, so is the smallest-memory plan."""
    others = {
        limit: known.search(limit, _counted(say, f"limit {k} of {len(limits)}"))
        for k, limit in enumerate(limits, 1)
    }
    if min(each.peak_bytes for each in known.plans()) > min(limits):
        known.find_smallest_memory(_counted(say, "the least memory"))
    return others


def _ladder(known: _Known, own: int, say: Say) -> dict[int, Sequence[Other]]:
    """The same of a ladder of limits, each such a part of the last plan's peak that equal parts
    lead to the smallest-memory plan; and of `own` where it lies between."""
    known.find_smallest_memory(_counted(say, "the least memory"))
    least = min(each.peak_bytes for each in known.plans())
    limit = min(known.plans(), key=_order).peak_bytes
    others = dict[int, Sequence[Other]]()
    for left in reversed(range(NUM_LIMITS)):
        told = _counted(say, f"limit {NUM_LIMITS - left} of {NUM_LIMITS}")
        others[limit] = known.search(limit, told)
        within = (found for found in known.plans() if found.peak_bytes <= limit)
        peak = min(within, key=_order).peak_bytes
        if not left or peak == least:
            break
        limit = round(peak * (least / peak) ** (1 / left))
        if limit < own < peak:
            others[own] = known.search(own, told)
    return others


class _InStages:
    """Plans in several stages, or in one: each limit is planned within from the start."""

    def __init__(self, graph_request: GraphRequest, trail: Trail) -> None:
        self._graph_request, self._trail = graph_request, trail
        self._findings: list[tuple[int, Finding]] = []
        self._failed = 0
        """The largest limit within which nothing is found."""

    def plans(self) -> Sequence[Finding]:
        """All that are known."""
        return [found for _, found in self._findings]

    def search(self, limit: int, say: Say) -> Sequence[Other]:
        """Adds the best plan within a limit, where that is not at hand. Nothing is known of single
        candidates."""
        if limit <= self._failed or any(n >= limit >= f.peak_bytes for n, f in self._findings):
            return ()
        options = replace(self._graph_request.options, memory_limit_bytes=limit)
        say(f"within {format_bytes(limit)}" if limit < BOUNDLESS_BYTES else "planning")
        try:
            found = best_of_all(replace(self._graph_request, options=options), self._trail)
            self._findings.append((limit, found))
        except REFUSALS:
            if not self._findings:
                raise
            self._failed = limit
        return ()

    def find_smallest_memory(self, say: Say) -> None:
        """Between what nothing is found within and the least that is found."""
        for _ in range(_SMALLEST_MEMORY_TRIES):
            least = min(each.peak_bytes for each in self.plans())
            self.search((self._failed + least) // 2, say)


class _InOne:
    """Plans in one stage, on each mesh that is admitted."""

    def __init__(
        self, graph_request: GraphRequest, own: int, limits: Sequence[int], trail: Trail
    ) -> None:
        self._graph_request = graph_request
        with explaining(graph_request, trail):
            first = survey(graph_request, trail)
        meshes = [
            _OnMesh(
                graph_request.on(other.mesh), other.finding and other.finding.only, other.bound_ns
            )
            for other in first.others
            if other.mesh is not None
        ]
        if graph_request.options.microbatches is None:
            counts = possible_counts(graph_request.graph)[1:]
            meshes += [
                _OnMesh(replace(mesh.request, microbatches=count))
                for mesh in meshes
                for count in counts
            ]
        if graph_request.options.loss_chunks is None:
            least = min(limits) if limits else min(own, first.peak_bytes)
            meshes += [
                _OnMesh(replace(mesh.request, loss_chunks=count))
                for mesh in meshes
                for count in _chunk_counts(mesh.request, own, least)
            ]
        self._meshes = meshes

    def plans(self) -> Sequence[Finding]:
        """All that are known."""
        return [
            in_one_stage(self._graph_request, found)
            for mesh in self._meshes
            for found in mesh.candidates
        ]

    def search(self, limit: int, say: Say) -> Sequence[Other]:
        """Adds the best plan within a limit, where that is not at hand, and returns what is known
        of all candidates within it."""
        for mesh in self._meshes:
            steps = [
                found.solution.objective
                for each in self._meshes
                for found in each.candidates
                if _peak(found) <= limit
            ]
            known = min(steps, default=None)
            if mesh.may_gain(limit, known):
                # Alone, a mesh spares itself the bound that a cutoff is compared with first.
                mesh.find_within(limit, known if len(self._meshes) > 1 else None, say)
        return [self._other(mesh, limit) for mesh in self._meshes]

    def _other(self, mesh: _OnMesh, limit: int) -> Other:
        """What is known of a mesh within a limit."""
        fitting = (found for found in mesh.candidates if _peak(found) <= limit)
        best = min(fitting, key=lambda found: found.solution.objective, default=None)
        found = None if best is None else in_one_stage(self._graph_request, best)
        return Other(mesh.request.name, mesh.bound, found, mesh.request.mesh)

    def find_smallest_memory(self, say: Say) -> None:
        """Adds plans that hold as little as any that are found."""
        for mesh in self._meshes:
            mesh.find_smallest_memory(say)


_Known = _InStages | _InOne
"""Plans that are known, of whatever limit. Limits that are searched descend."""


@dataclass(slots=True)
class _OnMesh:
    """What is known of one mesh, number of microbatches and of chunks of the loss: plans
    `candidates` on it, the `latest` that a search within a limit came to, and that none within that
    takes less than `bound` nanoseconds as modelled. It `is_exhausted` once a limit was too small
    for any plan."""

    request: PlanRequest
    latest: Candidate | None = None
    bound: int = 0
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    is_exhausted: bool = False
    stated: Problem | None = None

    def __post_init__(self) -> None:
        self.candidates += [self.latest] if self.latest is not None else []
        if not self.request.options.fuses(self.request.cluster.device):
            # Not of the same plans: what is recomputed was not open.
            self.latest, self.bound = None, 0

    def find_smallest_memory(self, say: Say) -> None:
        """Finds the best of the plans that hold least when forward ends."""
        say(f"{self.request.name}: solving")
        self.candidates.append(smallest_memory(self.request, say, self._stated()))

    def find_within(self, limit: int, cutoff: int | None, say: Say) -> None:
        """Finds the best plan within `limit`, which is below those tried before, if there is one
        that takes less than `cutoff`."""
        self.latest, allowance = None, limit if limit < BOUNDLESS_BYTES else None
        say(
            f"{self.request.name}: solving"
            + (f" within {format_bytes(allowance)}" if allowance else "")
        )
        try:
            self.latest = self._solved(limit, allowance, say, cutoff)
        except InfeasibleError:
            self.is_exhausted = True
        except Beaten as beaten:
            self.bound = max(self.bound, beaten.bound)
        else:
            self.bound = max(self.bound, self.latest.solution.bound)
            self.candidates.append(self.latest)

    def may_gain(self, limit: int, known: int | None) -> bool:
        """Whether a search within `limit` may find a plan that takes less than `known`, by more
        than plans are proven to."""
        if self.latest is not None and _peak(self.latest) <= limit:
            return False
        return not self.is_exhausted and (known is None or self.bound < known * (1 - PROVEN))

    def _solved(
        self, limit: int, allowance: int | None, say: Say, cutoff: int | None = None
    ) -> Candidate:
        stated = replace(self._stated(), usage_limit=allowance)
        after = self.candidates[-1] if self.candidates else None
        return best_on(self.request.opened().within(limit), say, cutoff, stated, after=after)

    def _stated(self) -> Problem:
        """The problem that is open about what is recomputed."""
        if self.stated is None:
            self.stated = price(self.request.opened())
        return self.stated


def _order(finding: Finding) -> tuple[int, int, int]:
    """The better the lower: by the step as it is simulated, of which what the solver makes least of
    is a model."""
    return finding.step_ns, finding.objective_ns, finding.peak_bytes


def _counted(say: Say, where: str) -> Say:
    return lambda text: say(f"{where}: {text}")


def _peak(candidate: Candidate) -> int:
    return candidate.estimates.memory.total
