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
from autopar.cost_model.rates import peak_s
from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import CandidateSearch, Trail
from autopar.driver.search.infeasible_subset import explain_infeasible, suited
from autopar.driver.search.on_mesh import best_on_mesh
from autopar.driver.search.shortage import explain_shortage
from autopar.errors import ClusterError, InfeasibleError, UnsuitedMeshError
from autopar.ir.contractions import batch_atoms
from autopar.ir.graph import Graph, Role
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.own_ops import is_end
from autopar.ir.problem import Solution
from autopar.ir.units import format_ns
from autopar.ir.uses import groups
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import StageEstimates, of_one_stage
from autopar.plans.memory_refinement import Candidate, bounded
from autopar.plans.plan import Plan
from autopar.plans.provenance import PROVEN
from autopar.plans.requests.options import AUTO, Options
from autopar.plans.requests.request import GraphRequest, PlanRequest
from autopar.plans.requests.strategies import MAX_AXES

_AXES, _MOST_AXES = 2, 3
"""Meshes of up to 2 axes are all tried by default, and a few of 3."""


_SEVERAL = 2
"""So many samples a rank are enough to shard nothing but samples over nodes."""


@contextmanager
def explaining(graph_request: GraphRequest, say: Say) -> Generator[None]:
    """Within it, if no mesh has a plan, the error says what the first mesh lacks and what would do,
    or which constraints conflict."""
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
    """The best plan over all meshes that the options admit, and what is known of the others.

    Likely meshes come first (`_in_order`): a good incumbent cuts off the others early. A mesh is
    cut off once it is known to have no plan better than the incumbent, or none within
    `margin` (a fraction) of it. It is also cut off if its solve without a memory limit finds none.
    Unless a mesh is named, the meshes of three axes with the lowest bounds come last. Of equally
    good meshes the first that is listed wins. InfeasibleError, that of the first mesh, if none has
    a plan within the memory limit.
    """
    looked = _Looked(graph_request, trail, margin)
    for place, request, slack in looked.in_order():
        with looked.search.attempt(rank=place, slack=slack) as tried:
            best = looked.search.incumbent
            after = best if best is not None and best.is_tight else None
            near = None if best is None else best.request.microbatches
            tried.result = best_on_mesh(request, trail, tried.needed_ns, after=after, near=near)
        looked.take(place, request.mesh, tried.result)
    return looked.finding()


class _Looked:
    """The meshes that were tried, by their ranks in the order of preference."""

    def __init__(self, graph_request: GraphRequest, trail: Trail, margin: float) -> None:
        self._request, self._trail = graph_request, trail
        self._by_rank: dict[int, tuple[Mesh, Candidate | None]] = {}
        self.search = CandidateSearch[Candidate](
            trail,
            cost_ns=lambda candidate: candidate.solution.objective,
            bound_ns=lambda candidate: candidate.solution.bound,
            slack=margin,
        )

    def in_order(self) -> Iterator[tuple[int, PlanRequest, float | None]]:
        """The meshes to try, each with its rank, its request, and a slack. The slack is the part by
        which its plans may be worse than the incumbent, the margin where it is None. Those of
        three axes have to be better by as much as the best may be above its own bound."""
        requests = suited(self._request, meshes_of(self._request.cluster, self._request.options))
        for place in _in_order(requests):
            yield place, requests[place], None
        least = self._request.options.policy.refined_devices
        if self._request.cluster.num_devices < least:
            if finer_meshes(self._request):
                self._trail.skip("meshes of three axes", f"refined_devices {least}")
            return
        more = [*enumerate(_finer(self._request), len(requests))]
        yield from self._finer(sorted(more, key=lambda each: self.refined_ns(each[1].mesh)))

    def take(self, place: int, mesh: Mesh, candidate: Candidate | None) -> None:
        """Stores the outcome of a mesh."""
        self._by_rank[place] = mesh, candidate

    def _finer(
        self, listed: Sequence[tuple[int, PlanRequest]]
    ) -> Iterator[tuple[int, PlanRequest, float | None]]:
        """Meshes of three axes, those with the lowest bounds first. Unless its plan becomes the
        incumbent, such a mesh has neither bound nor margin in the finding: both would take long to
        know as well as for the others."""
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
            yield place, request, -PROVEN
            if self.search.rank != place:
                self.search.forget(place)
                del self._by_rank[place]
        for why, meshes in skipped.items():
            self._trail.skip(f"meshes {'; '.join(meshes)}", why)

    def _unpromising(self, request: PlanRequest) -> str:
        """Why a mesh of three axes is not worth a search; empty if it is. Joining two neighbouring
        axes of it makes two meshes of two axes, and both have to be near the incumbent, as far as
        is known. None is worth it where memory binds: a search then takes minutes."""
        best, policy = self.search.incumbent, request.options.policy
        if best is None:
            return "no mesh of two axes has a plan"
        if best.peak_candidates and best.solution.is_limiting:
            return "memory binds"
        if len(best.problem.keys) > policy.refined_nodes:
            return f"refined_nodes {policy.refined_nodes}"
        if self.refined_ns(request.mesh) > best.solution.objective * (1 + policy.refined_within):
            return f"refined_within {policy.refined_within:g}"
        return self._trail.why

    def refined_ns(self, mesh: Mesh) -> float:
        """The bound of the worse of the two meshes that one of three axes refines, as far as it is
        known."""
        search, meshes = self.search, {k: mesh.sizes for k, (mesh, _) in self._by_rank.items()}
        known = {meshes[place]: float(bound) for place, bound in search.bounds.items()}
        return refined_ns(mesh, known | {meshes[place]: inf for place in search.failures})

    def finding(self) -> Finding:
        """The best plan, with the others. InfeasibleError, that of the first mesh, if none has a
        plan."""
        graph_request, best, bounds = self._request, self.search.result(), self.search.bounds
        best = replace(best, solution=bounded(best.solution, self.search.least_ns))
        others = [
            Other(
                f"mesh {mesh}",
                bounds[place],
                candidate and in_one_stage(graph_request, candidate),
                mesh,
            )
            for place, (mesh, candidate) in sorted(self._by_rank.items())
            if place in bounds
        ]
        return in_one_stage(graph_request, best, others)


def in_one_stage(
    graph_request: GraphRequest, candidate: Candidate, others: Sequence[Other] = ()
) -> Finding:
    """A plan in one stage, as the result of a search."""
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
    """The step of the worse of the two meshes that one of three axes refines, as far as it is
    `known` by the sizes of axes."""
    a, b, c = mesh.sizes
    # Over links of one kind, of two orders of the same axes one is listed.
    joined = [known.get(some, known.get(some[::-1])) for some in ((a * b, c), (a, b * c))]
    return max((bound for bound in joined if bound is not None), default=inf)


def finer_meshes(graph_request: GraphRequest) -> Sequence[Mesh]:
    """Meshes of three axes, some of which are tried if no mesh is named."""
    if graph_request.options.mesh != AUTO:
        return ()
    listed = meshes_of(graph_request.cluster, graph_request.options)
    more = replace(graph_request.options, mesh=f"{AUTO}:{_MOST_AXES}")
    return [mesh for mesh in meshes_of(graph_request.cluster, more) if mesh not in listed]


def _finer(graph_request: GraphRequest) -> Sequence[PlanRequest]:
    """The request on `finer_meshes`."""
    finer = finer_meshes(graph_request)
    try:
        return suited(graph_request, finer) if finer else ()
    except UnsuitedMeshError:
        return ()


def _in_order(requests: Sequence[PlanRequest]) -> list[int]:
    """The places of `requests`, of one cluster, in the order they are tried: likely ones first.
    Before those comes the mesh that shards the samples most, if all ranks of its outer axis have
    several. A second axis has to be within a node, and gathers of parameters have to hide. On one
    axis problems are a fraction as large besides."""
    cluster, graph = requests[0].cluster, requests[0].graph
    hides = _hides_gathers(graph, cluster)
    samples = min((graph.atoms[atom].size for atom in batch_atoms(graph)), default=0)

    def num_shards(place: int) -> int:
        first = prod(requests[place].mesh.sizes[:1])
        others = cluster.num_devices // first
        is_near = others == 1 or (hides and cluster.devices_of_node % others == 0)
        is_even = samples % first == 0 and samples >= _SEVERAL * first
        return first if is_near and is_even else 0

    places = likely_first(requests)
    most = max(places, key=num_shards)
    return sorted(places, key=lambda place: place != most or not num_shards(place))


def _hides_gathers(graph: Graph, cluster: Cluster) -> bool:
    """Whether the links between nodes gather all parameters twice, and reduce their gradients, in
    the time that compute takes at half its peak."""
    outer, *inner = cluster.levels
    num_bytes = sum(node.outputs[0].num_bytes for node in graph.with_role(Role.PARAM))
    sent_s = 3 * num_bytes / (outer.link.bytes_per_s * prod(level.size for level in inner))
    return sent_s <= 2 * peak_s(graph, cluster, range(len(graph.nodes)))


def likely_first(requests: Sequence[PlanRequest]) -> list[int]:
    """The places of `requests`, of one cluster, likely ones first: the mesh along the levels of the
    cluster, then those most like it."""

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
    """The meshes that `options` admit on `cluster`, in order of preference. ClusterError if they
    name one that it does not have."""
    word, colon, number = options.mesh.partition(":")
    if word != AUTO:
        return (with_buckets(parse_mesh(options.mesh, cluster), cluster.device),)
    if colon and not (number.isdecimal() and number.isascii()):
        raise ClusterError(f"mesh {options.mesh!r}: write auto:3 for meshes of up to three axes")
    max_axes = int(number) if colon else max(_AXES, MAX_AXES.get(options.strategy, 1))
    meshes = candidate_meshes(cluster, max_axes, in_order=bool(options.imposed))
    return tuple(with_buckets(mesh, cluster.device) for mesh in meshes)


def _failure(say: Say, request: PlanRequest, solves: bool) -> InfeasibleError | None:
    """Why there is no plan for a request, or None if there is one. Without solving, only what
    leaves a node without any choice counts."""
    try:
        if solves:
            best_on_mesh(request, Trail(say))
        else:
            limited_classes(request, groups(request.step))
    except InfeasibleError as error:
        return error
    return None


def estimates_of(best: Candidate, solution: Solution) -> StageEstimates:
    """The estimates of another plan on the mesh of `best`, temporaries included."""
    stage = make_stage(best.request, best.problem, solution)
    return cost_breakdown(best.request, stage).estimates


def summary(plan: Plan) -> str:
    """A plan in one line."""
    estimates = plan.estimates
    return (
        f"step {format_ns(estimates.step_ns)}, of which exposed communication "
        f"{format_ns(estimates.exposed_communication_ns)}; as modelled "
        f"{format_ns(plan.provenance.objective_ns)}, {plan.provenance.status}"
    )
