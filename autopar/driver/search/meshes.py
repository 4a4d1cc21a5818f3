"""The search over meshes: the best plan on each that is worth trying, and the best of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf, log2, prod

from autopar.cluster.mesh_shapes import candidate_meshes, parse_mesh
from autopar.compile import Say
from autopar.cost_model.collectives import with_buckets
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import limited_classes
from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import CandidateSearch, Trail
from autopar.driver.search.infeasible_subset import explain_infeasible, suited
from autopar.driver.search.on_mesh import best_on_mesh
from autopar.driver.search.shortage import explain_shortage
from autopar.errors import ClusterError, InfeasibleError, UnsuitedMeshError
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.own_ops import is_end
from autopar.ir.problem import Solution
from autopar.ir.units import format_ns
from autopar.ir.uses import groups
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import StageEstimates, of_one_stage
from autopar.plans.memory_refinement import Candidate, bounded
from autopar.plans.plan import Plan
from autopar.plans.requests.options import AUTO, Options
from autopar.plans.requests.request import GraphRequest, PlanRequest
from autopar.plans.requests.strategies import MAX_AXES

_AXES, _MOST_AXES = 2, 3
"""How many axes meshes have that are all tried unasked, and those of which a few are."""


@contextmanager
def explaining(graph_request: GraphRequest, say: Say) -> Generator[None]:
    """Within it, where no mesh has a plan, the error says what is missing on the first mesh and
    what would do, or which of the limits that are asked for conflict."""
    try:
        yield
    except InfeasibleError as why:
        first = suited(graph_request, meshes_of(graph_request.cluster, graph_request.options))[0]
        if graph_request.options.imposed:
            say("looking for the limits that conflict")
            raise explain_infeasible(first, partial(_failure, say)) from why
        if any(map(is_end, graph_request.graph.nodes)):
            # Of a stage: more devices or a smaller batch are for all stages to have.
            raise
        raise InfeasibleError(explain_shortage(graph_request, first, why, say)) from why


def survey(graph_request: GraphRequest, trail: Trail, *, margin: float = 0.0) -> Finding:
    """The best plan over all meshes that are admitted, and what is known of the others.

    Meshes like the levels of the cluster come first: a good plan in hand cuts off the others as
    soon as they are known to have no better one, or none within `margin` (a fraction) of it, or
    none was found without a limit on memory. Where no mesh is named, those of three axes that
    promise the most come last. Of equally good meshes the first that is listed wins.
    InfeasibleError, that of the first mesh, if none has a plan within the memory limit.
    """
    looked = _Looked(graph_request, trail, margin)
    for place, request, slack in looked.in_order():
        with looked.search.attempt(rank=place, slack=slack) as tried:
            best = looked.search.incumbent
            after = best if best is not None and best.is_tight else None
            tried.result = best_on_mesh(request, trail, tried.needed_ns, after=after)
        looked.take(place, request.mesh, tried.result)
    return looked.finding()


class _Looked:
    """What is known of the meshes that were looked at, by their places in the order in which they
    are preferred."""

    def __init__(self, graph_request: GraphRequest, trail: Trail, margin: float) -> None:
        self._request, self._trail = graph_request, trail
        self._by_rank: dict[int, tuple[Mesh, Candidate | None]] = {}
        self.search = CandidateSearch[Candidate](
            trail,
            cost_ns=lambda found: found.solution.objective,
            bound_ns=lambda found: found.solution.bound,
            slack=margin,
        )

    def in_order(self) -> Iterator[tuple[int, PlanRequest, float | None]]:
        """The meshes that are to be looked at, each with its place, and with how much better plans
        there have to be than the best so far, or how much worse they may be."""
        requests = suited(self._request, meshes_of(self._request.cluster, self._request.options))
        for place in likely_first(requests):
            yield place, requests[place], None
        least = self._request.options.policy.refined_devices
        if self._request.cluster.num_devices < least:
            if finer_meshes(self._request):
                self._trail.skip("meshes of three axes", f"refined_devices {least}")
            return
        more = [*enumerate(_finer(self._request), len(requests))]
        yield from self._finer(sorted(more, key=lambda each: self.refined_ns(each[1].mesh)))

    def take(self, place: int, mesh: Mesh, candidate: Candidate | None) -> None:
        """What became of a mesh."""
        self._by_rank[place] = mesh, candidate

    def _finer(
        self, listed: Sequence[tuple[int, PlanRequest]]
    ) -> Iterator[tuple[int, PlanRequest, float | None]]:
        """Meshes of more axes than are all tried, the most promising first. Unless its plan is the
        best, what is said of that one is not said of such a mesh: neither its bound nor its margin,
        which would take long to be known as well as those of the others."""
        skipped = dict[str, list[str]]()
        looked = 0
        for place, request in listed:
            policy = request.options.policy
            why = self._unpromising(request)
            if not why and looked >= policy.refined_most:
                why = f"refined_most {policy.refined_most}"
            if why:
                skipped.setdefault(why, []).append(str(request.mesh))
                continue
            looked += 1
            yield place, request, -policy.refined_gain
            if self.search.rank != place:
                self.search.forget(place)
                del self._by_rank[place]
        for why, meshes in skipped.items():
            self._trail.skip(f"meshes {'; '.join(meshes)}", why)

    def _unpromising(self, request: PlanRequest) -> str:
        """Why a mesh of three axes is not worth a search, if it is not: the meshes of two that
        joining neighbouring axes of it makes are to be both near the best plan, as far as is known.
        None is where memory binds: a search then takes minutes."""
        best, policy = self.search.incumbent, request.options.policy
        if best is None:
            return "no mesh of two axes has a plan"
        if best.is_tight:
            return "memory binds"
        if len(best.problem.keys) > policy.refined_nodes:
            return f"refined_nodes {policy.refined_nodes}"
        if self.refined_ns(request.mesh) > best.solution.objective * (1 + policy.refined_within):
            return f"refined_within {policy.refined_within:g}"
        return ""

    def refined_ns(self, mesh: Mesh) -> float:
        """The bound of the worse of the two meshes that one of three axes refines, as far as it is
        known."""
        search, meshes = self.search, {k: mesh.sizes for k, (mesh, _) in self._by_rank.items()}
        known = {meshes[place]: float(bound) for place, bound in search.bounds.items()}
        return refined_ns(mesh, known | {meshes[place]: inf for place in search.failures})

    def finding(self) -> Finding:
        """All of it. InfeasibleError, that of the first mesh, if none has a plan."""
        asked, best, bounds = self._request, self.search.result(), self.search.bounds
        best = replace(best, solution=bounded(best.solution, self.search.least_ns))
        others = [
            Other(f"mesh {mesh}", bounds[place], found and in_one_stage(asked, found), mesh)
            for place, (mesh, found) in sorted(self._by_rank.items())
            if place in bounds
        ]
        return in_one_stage(asked, best, others)


def in_one_stage(
    graph_request: GraphRequest, candidate: Candidate, others: Sequence[Other] = ()
) -> Finding:
    """A plan in one stage, as what a search found."""
    solution = candidate.solution
    return Finding(
        graph_request,
        (candidate,),
        of_one_stage(candidate.estimates),
        solution.objective,
        solution.bound,
        solution.status.value,
        tuple(others),
        imposed=candidate.request.describe_imposed(),
        statistics=solution.statistics,
    )


def refined_ns(mesh: Mesh, known: Mapping[tuple[int, ...], float]) -> float:
    """What the worse of the two meshes takes that one of three axes refines, as far as that is
    known by their sizes."""
    a, b, c = mesh.sizes
    # Over links of one kind, of two orders of the same axes one is listed.
    joined = [known.get(some, known.get(some[::-1])) for some in ((a * b, c), (a, b * c))]
    return max((bound for bound in joined if bound is not None), default=inf)


def finer_meshes(graph_request: GraphRequest) -> Sequence[Mesh]:
    """Meshes of more axes than are all tried, of which a few are where none is named."""
    if graph_request.options.mesh != AUTO:
        return ()
    listed = meshes_of(graph_request.cluster, graph_request.options)
    more = replace(graph_request.options, mesh=f"{AUTO}:{_MOST_AXES}")
    return [mesh for mesh in meshes_of(graph_request.cluster, more) if mesh not in listed]


def _finer(graph_request: GraphRequest) -> Sequence[PlanRequest]:
    """What is asked, on `finer_meshes`."""
    finer = finer_meshes(graph_request)
    try:
        return suited(graph_request, finer) if finer else ()
    except UnsuitedMeshError:
        return ()


def likely_first(requests: Sequence[PlanRequest]) -> list[int]:
    """The places of `requests`, of the same cluster, in the order they are tried: on the mesh along
    its levels first, then on those that are the most like it."""

    def unlikeness(place: int) -> float:
        cluster, mesh = requests[place].cluster, requests[place].mesh
        levels, axes = _inner([level.size for level in cluster.levels]), _inner(mesh.sizes)
        return _farness(axes, levels) + _farness(levels, axes)

    return sorted(range(len(requests)), key=lambda place: (unlikeness(place), place))


def _inner(sizes: Sequence[int]) -> list[float]:
    """How many devices the innermost of `sizes` have, none to all of them, as logarithms."""
    return [log2(prod(sizes[place:])) for place in range(len(sizes) + 1)]


def _farness(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(min(abs(each - other) for other in others) for each in some)


def meshes_of(cluster: Cluster, options: Options) -> Sequence[Mesh]:
    """Those that `options` admit on `cluster`, in the order in which they are preferred.
    ClusterError if they name one that it does not have."""
    word, colon, number = options.mesh.partition(":")
    if word != AUTO:
        return (with_buckets(parse_mesh(options.mesh, cluster), cluster.device),)
    if colon and not (number.isdecimal() and number.isascii()):
        raise ClusterError(f"mesh {options.mesh!r}: write auto:3 for meshes of up to three axes")
    max_axes = int(number) if colon else max(_AXES, MAX_AXES.get(options.strategy, 1))
    found = candidate_meshes(cluster, max_axes, in_order=bool(options.imposed))
    return tuple(with_buckets(mesh, cluster.device) for mesh in found)


def _failure(say: Say, request: PlanRequest, solves: bool) -> InfeasibleError | None:
    """Why there is no plan as it is wanted, or None if there is one; without solving, only what
    leaves something without any choice is told."""
    try:
        if solves:
            best_on_mesh(request, Trail(say))
        else:
            limited_classes(request, groups(request.step))
    except InfeasibleError as error:
        return error
    return None


def estimates_of(best: Candidate, solution: Solution) -> StageEstimates:
    """What another plan on the mesh of `best` takes and holds, temporaries included."""
    stage = make_stage(best.request, best.problem, solution)
    return cost_breakdown(best.request, stage).estimates


def summary(plan: Plan) -> str:
    """One line on what was found."""
    estimates = plan.estimates
    return (
        f"step {format_ns(estimates.step_ns)}, of which exposed communication "
        f"{format_ns(estimates.exposed_communication_ns)}; as modelled "
        f"{format_ns(plan.provenance.objective_ns)}, {plan.provenance.status}"
    )
