"""Time against memory: the best plans within a ladder of memory limits.

A plan within a limit is within every larger one. Every plan that a search comes across is therefore
a candidate for all limits. More memory never comes with a longer step, though the search is not
exact where temporaries are large. Each mesh states the problem with open recompute once; only the
limit differs.
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
"""Limits of a ladder, unless limits are given."""

_SMALLEST_MEMORY_TRIES = 6
"""How many limits are tried for the least memory of plans in stages: down to 1/64 of the most."""


def find_frontier(graph_request: GraphRequest, limits: Sequence[int], say: Say) -> Frontier:
    """The best plans within each of `limits`, in bytes per device, descending.

    Without limits, a ladder of them leads from the peak of the best plan of all down to that of the
    smallest-memory plan, and each plan stands once. The memory limit of the request, or else the
    memory of a device, is a rung if it lies between.

    Errors are those of `planning.answer`, but no limit is too small: its point has no plan.
    """
    own = graph_request.options.memory_limit_bytes or graph_request.cluster.device.memory_bytes
    boundless = replace(graph_request.options, memory_limit_bytes=BOUNDLESS_BYTES)
    graph_request, trail = replace(graph_request, options=boundless), Trail(say)
    known = (
        _InStages(graph_request, trail)
        if graph_request.options.is_staged
        else _InOne(graph_request, own, limits, trail)
    )
    top = known.search(BOUNDLESS_BYTES, _counted(say, "without a limit"))
    others_within = _given(known, limits, say) if limits else _ladder(known, own, say)
    best, *more = sorted(known.plans(), key=_order)
    points: list[FrontierPoint] = []
    for limit, others in others_within.items():
        chosen = next((each for each in (best, *more) if each.peak_bytes <= limit), None)
        plan = None if chosen is None else _plan(chosen, limit, others, trail)
        points.append(FrontierPoint(limit, plan))
    if not limits:
        alike = [_digest(a) == _digest(b) and a.limit_bytes != own for a, b in pairwise(points)]
        points = [
            p for p, is_repeated in zip(points, [*alike, False], strict=True) if not is_repeated
        ]
    least = min(each.peak_bytes for each in (best, *more))
    return Frontier(own, _plan(best, best.peak_bytes, top, trail), least, tuple(points))


def _plan(chosen: Finding, limit: int, others: Sequence[Other], trail: Trail) -> Plan:
    """The best plan within a limit, beside the `others` within it, with its margin if that is an
    option."""
    within_limit = [
        each if each.finding and each.finding.peak_bytes <= limit else replace(each, finding=None)
        for each in others
    ]
    bound_ns = min((each.bound_ns for each in others), default=chosen.bound_ns)
    finding = replace(chosen.within(limit), others=(*chosen.others, *within_limit)).proven(bound_ns)
    margin = (
        find_margin(finding, trail) if finding.graph_request.options.given.search.margin else None
    )
    return finding.plan(margin, trail.outcomes)


def _chunk_counts(request: PlanRequest, own: int, least: int) -> list[int]:
    """The numbers of chunks of the loss to try within the `least` limit, and the largest for
    `own`."""
    counts = {*chunk_ladder(request.within(least)), chunk_count(request.within(own))}
    return sorted(counts - {1})


def _digest(point: FrontierPoint) -> str:
    return point.plan.digest if point.plan is not None else ""


def _given(known: _Known, limits: Sequence[int], say: Say) -> dict[int, Sequence[Other]]:
    """The other candidates by limit, descending. If a limit is too small for any plan, the
    smallest-memory plan is searched as well."""
    others = {
        limit: known.search(limit, _counted(say, f"limit {k} of {len(limits)}"))
        for k, limit in enumerate(limits, 1)
    }
    if min(each.peak_bytes for each in known.plans()) > min(limits):
        known.find_smallest_memory(_counted(say, "the least memory"))
    return others


def _ladder(known: _Known, own: int, say: Say) -> dict[int, Sequence[Other]]:
    """The other candidates by limit, on a ladder: each limit is a part of the last plan's peak, so
    that equal factors lead to the smallest-memory plan. `own` is a limit too if it lies between."""
    known.find_smallest_memory(_counted(say, "the least memory"))
    least = min(each.peak_bytes for each in known.plans())
    limit = min(known.plans(), key=_order).peak_bytes
    others = dict[int, Sequence[Other]]()
    for left in reversed(range(NUM_LIMITS)):
        counted = _counted(say, f"limit {NUM_LIMITS - left} of {NUM_LIMITS}")
        others[limit] = known.search(limit, counted)
        within = (finding for finding in known.plans() if finding.peak_bytes <= limit)
        peak = min(within, key=_order).peak_bytes
        if not left or peak == least:
            break
        limit = round(peak * (least / peak) ** (1 / left))
        if limit < own < peak:
            others[own] = known.search(own, counted)
    return others


class _InStages:
    """Plans in several stages, or in one: each limit is searched from scratch."""

    def __init__(self, graph_request: GraphRequest, trail: Trail) -> None:
        self._graph_request, self._trail = graph_request, trail
        self._findings: list[tuple[int, Finding]] = []
        self._failed = 0
        """The largest limit without a plan."""

    def plans(self) -> Sequence[Finding]:
        """All that are known."""
        return [finding for _, finding in self._findings]

    def search(self, limit: int, say: Say) -> Sequence[Other]:
        """Adds the best plan within a limit, unless it is known. Single candidates have no
        bounds."""
        if limit <= self._failed or any(n >= limit >= f.peak_bytes for n, f in self._findings):
            return ()
        options = replace(self._graph_request.options, memory_limit_bytes=limit)
        say(f"within {format_bytes(limit)}" if limit < BOUNDLESS_BYTES else "planning")
        try:
            finding = best_of_all(replace(self._graph_request, options=options), self._trail)
            self._findings.append((limit, finding))
        except REFUSALS:
            if not self._findings:
                raise
            self._failed = limit
        return ()

    def find_smallest_memory(self, say: Say) -> None:
        """Bisects between the largest limit without a plan and the least peak."""
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
            _, *counts = possible_counts(graph_request.graph, graph_request.cluster.num_devices)
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
            in_one_stage(self._graph_request, candidate)
            for mesh in self._meshes
            for candidate in mesh.candidates
        ]

    def search(self, limit: int, say: Say) -> Sequence[Other]:
        """Adds the best plan within a limit, unless it is known; the candidates, with their
        bounds."""
        for mesh in self._meshes:
            steps = [
                candidate.solution.objective
                for each in self._meshes
                for candidate in each.candidates
                if _peak(candidate) <= limit
            ]
            known = min(steps, default=None)
            if mesh.may_gain(limit, known):
                # The only mesh needs no cutoff, and so not the bound that is compared with it.
                mesh.find_within(limit, known if len(self._meshes) > 1 else None, say)
        return [self._other(mesh, limit) for mesh in self._meshes]

    def _other(self, mesh: _OnMesh, limit: int) -> Other:
        """A mesh as a candidate within a limit."""
        within = (candidate for candidate in mesh.candidates if _peak(candidate) <= limit)
        best = min(within, key=lambda candidate: candidate.solution.objective, default=None)
        finding = None if best is None else in_one_stage(self._graph_request, best)
        return Other(mesh.request.name, mesh.bound, finding, mesh.request.mesh)

    def find_smallest_memory(self, say: Say) -> None:
        """Adds the smallest-memory plan of each mesh."""
        for mesh in self._meshes:
            mesh.find_smallest_memory(say)


_Known = _InStages | _InOne
"""Plans that are known, of whatever limit. Limits that are searched descend."""


@dataclass(slots=True)
class _OnMesh:
    """One mesh, number of microbatches and number of chunks of the loss, with the plans
    `candidates` on it. `latest` is the result of the last search within a limit, and no plan within
    that limit takes less than `bound` nanoseconds as modelled. It `is_exhausted` once a limit is
    too small for any plan."""

    request: PlanRequest
    latest: Candidate | None = None
    bound: int = 0
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    is_exhausted: bool = False
    stated: Problem | None = None

    def __post_init__(self) -> None:
        self.candidates += [self.latest] if self.latest is not None else []
        if not self.request.options.fuses(self.request.cluster.device):
            # The bound is of other plans: recompute was not open.
            self.latest, self.bound = None, 0

    def find_smallest_memory(self, say: Say) -> None:
        """Adds the best of the plans that hold least when forward ends."""
        say(f"{self.request.name}: solving")
        self.candidates.append(smallest_memory(self.request, say, self._stated()))

    def find_within(self, limit: int, cutoff: int | None, say: Say) -> None:
        """Adds the best plan within `limit`, which is below those tried before, if one takes less
        than `cutoff`."""
        self.latest, allowance = None, limit if limit < BOUNDLESS_BYTES else None
        say(
            f"{self.request.name}: solving"
            + (f" within {format_bytes(allowance)}" if allowance else "")
        )
        try:
            stated = replace(self._stated(), usage_limit=allowance)
            after = self.candidates[-1] if self.candidates else None
            request = self.request.opened().within(limit)
            self.latest = best_on(request, say, cutoff, stated, after=after)
        except InfeasibleError:
            self.is_exhausted = True
        except Beaten as beaten:
            self.bound = max(self.bound, beaten.bound)
        else:
            self.bound = max(self.bound, self.latest.solution.bound)
            self.candidates.append(self.latest)

    def may_gain(self, limit: int, known: int | None) -> bool:
        """Whether a search within `limit` may find a plan that takes less than `known`, by more
        than the gap of proven plans."""
        if self.latest is not None and _peak(self.latest) <= limit:
            return False
        return not self.is_exhausted and (known is None or self.bound < known * (1 - PROVEN))

    def _stated(self) -> Problem:
        """The problem with open recompute."""
        if self.stated is None:
            self.stated = price(self.request.opened())
        return self.stated


def _order(finding: Finding) -> tuple[int, int, int]:
    """The better the lower: by the step as simulated. The solver minimizes only a model of it."""
    return finding.step_ns, finding.objective_ns, finding.peak_bytes


def _counted(say: Say, where: str) -> Say:
    return lambda text: say(f"{where}: {text}")


def _peak(candidate: Candidate) -> int:
    return candidate.estimates.memory.total
