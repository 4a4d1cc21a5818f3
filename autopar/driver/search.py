"""The search over meshes: the best plan on each that is worth trying, and the best of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log2, prod

from autopar.cluster.mesh_shapes import candidate_meshes, parse_mesh
from autopar.compile import Say
from autopar.cost_model.account import account
from autopar.cost_model.bucket_sizes import with_buckets
from autopar.cost_model.price import limited_classes
from autopar.driver.infeasible_subset import explain_infeasible, suited
from autopar.driver.loss_chunking import best_in_chunks
from autopar.driver.shortage import explain_shortage
from autopar.driver.writing import found_by, write_plan
from autopar.errors import ClusterError, InfeasibleError, UnsuitedMeshError
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.problem import Solution
from autopar.ir.stages import is_end
from autopar.ir.units import format_ns
from autopar.ir.uses import groups
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import StageEstimates, of_one_stage
from autopar.plans.fitting import Beaten, Candidate, bounded
from autopar.plans.options import AUTO, Options
from autopar.plans.plan import Margin, Plan
from autopar.plans.request import Asked, PlanRequest
from autopar.plans.strategies import MAX_AXES

_AXES, _MOST_AXES = 2, 3
"""How many axes meshes have that are all tried unasked, and those of which a few are."""

_NEAR = 0.05
"""A mesh of three axes is tried where the two of two axes that it refines have bounds no further
above the best plan, as a part of it. What lies over two of three axes is sent in two steps, so that
such a mesh is hardly better than the worse of those two (by at most 4 % on 8x8 H100, ADR 7)."""

_MANY_DEVICES = 64
"""How many devices there are where meshes of three axes are tried unasked: on eight, one of them
takes several times as long as all others together, and little is to be gained."""

_MOST = 3
"""How many of them are tried at most, those first that refine the best meshes."""

_MANY_NODES = 1_000
"""Nodes of a problem, as of a model whose many layers differ, of which a mesh of three axes takes
as long as all others together: none is tried unasked."""

_HARDLY = 1e-3
"""By what part of the best plan others of three axes are to be better, unasked: as much the best
may be above its own bound."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of one mesh: no plan on it takes less than `bound` nanoseconds, and `found` is
    the best of them, unless the mesh was cut off."""

    mesh: Mesh
    bound: int
    found: Candidate | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What a search found: the best plan of all, the `meshes` that were looked at, and what is
    known of each on which there are plans, in their order."""

    best: Candidate
    meshes: tuple[Mesh, ...]
    tried: tuple[Tried, ...]


def search(asked: Asked, say: Say) -> Plan:
    """The plan with the shortest predicted step over all meshes that are admitted. InfeasibleError,
    with what would do, if none has a plan within the memory limit."""
    with explaining(asked, say):
        return planned(survey(asked, say))


@contextmanager
def explaining(asked: Asked, say: Say) -> Generator[None]:
    """Within it, where no mesh has a plan, the error says what is missing on the first mesh and
    what would do, or which of the limits that are asked for conflict."""
    try:
        yield
    except InfeasibleError as why:
        first = suited(asked, meshes_of(asked.cluster, asked.options))[0]
        if asked.options.asked:
            say("looking for the limits that conflict")
            raise explain_infeasible(first, partial(_failure, say)) from why
        if any(map(is_end, asked.graph.nodes)):
            # Of a stage: more devices or a smaller batch are for all stages to have.
            raise
        raise InfeasibleError(explain_shortage(asked, first, why, say)) from why


def survey(asked: Asked, say: Say, *, margin: float = 0.0, finer: bool = True) -> Survey:
    """The best plan over all meshes that are admitted, and what is known of the others.

    Meshes like the levels of the cluster come first: a good plan in hand cuts off the others as
    soon as they are known to have no better one, or none within `margin` (a fraction) of it, or
    none was found without a limit on memory. Where no mesh is named, those of three axes that
    promise the most come last, unless no `finer` ones are wanted. Of equally good meshes the first
    that is listed wins. InfeasibleError, that of the first mesh, if none has a plan within the
    memory limit.
    """
    looked = _Looked(say, margin)
    requests = suited(asked, meshes_of(asked.cluster, asked.options))
    for place in promising(requests):
        looked.at(requests[place], place)
    more = [*enumerate(_finer(asked) if finer else (), len(requests))]
    for place, request in sorted(more, key=lambda each: looked.refined_ns(each[1].mesh))[:_MOST]:
        if looked.is_promising(request.mesh):
            looked.at_finer(request, place)
    return looked.survey()


class _Looked:
    """What is known of the meshes that were looked at, by their places in the order in which they
    are preferred."""

    def __init__(self, say: Say, margin: float) -> None:
        self._say, self._margin = say, margin
        self._best: tuple[int, Candidate] | None = None
        self._tried: dict[int, Tried] = {}
        self._failures: dict[int, tuple[Mesh, InfeasibleError]] = {}

    def at(self, request: PlanRequest, place: int, *, margin: float | None = None) -> None:
        """Looks for plans on a mesh, as long as they may be better than the best so far, or come
        within a `margin` of it."""
        self._say(f"solving for mesh {request.mesh or 'of one device'}")
        best, least, cutoff = None, None, None
        if self._best is not None:
            best_place, best = self._best
            least = best.solution.objective + (place < best_place)
            cutoff = least + int(least * (self._margin if margin is None else margin))
        try:
            after = best if best is not None and best.is_tight else None
            found = best_in_chunks(request, self._say, cutoff, after=after)
        except InfeasibleError as error:
            self._failures[place] = request.mesh, error
            return
        except Beaten as beaten:
            self._say(f"{beaten}")
            self._tried[place] = Tried(request.mesh, beaten.bound, None)
            return
        self._tried[place] = Tried(request.mesh, found.solution.bound, found)
        if least is None or found.solution.objective < least:
            self._best = place, found

    def at_finer(self, request: PlanRequest, place: int) -> None:
        """The same on a mesh of more axes than are all tried. Unless its plan is the best, what is
        said of that one is not said of this mesh: neither its bound nor its margin, which would
        take long to be known as well as those of the others."""
        best = self._best
        self.at(request, place, margin=-_HARDLY)
        if self._best is best:
            self._tried.pop(place, None)
            self._failures.pop(place, None)

    def is_promising(self, mesh: Mesh) -> bool:
        """Whether a mesh of three axes may be worth a search: the meshes of two that joining
        neighbouring axes of it makes are both near the best plan, as far as is known. None is where
        memory binds: a search then takes minutes."""
        if self._best is None or self._best[1].is_tight:
            return False
        if len(self._best[1].problem.keys) > _MANY_NODES:
            return False
        return self.refined_ns(mesh) <= self._best[1].solution.objective * (1 + _NEAR)

    def refined_ns(self, mesh: Mesh) -> float:
        """The bound of the worse of the two meshes that one of three axes refines, as far as it is
        known."""
        known = {each.mesh.sizes: float(each.bound) for each in self._tried.values()}
        known |= {mesh.sizes: inf for mesh, _ in self._failures.values()}
        a, b, c = mesh.sizes
        # Over links of one kind, of two orders of the same axes one is listed.
        joined = [known.get(some, known.get(some[::-1])) for some in ((a * b, c), (a, b * c))]
        return max((bound for bound in joined if bound is not None), default=inf)

    def survey(self) -> Survey:
        """All of it. InfeasibleError, that of the first mesh, if none has a plan."""
        if self._best is None:
            raise self._failures[min(self._failures)][1]
        known = tuple(self._tried[place] for place in sorted(self._tried))
        best, bound = self._best[1], min(each.bound for each in known)
        best = replace(best, solution=bounded(best.solution, bound))
        failures = {place: mesh for place, (mesh, _) in self._failures.items()}
        meshes = {place: each.mesh for place, each in self._tried.items()} | failures
        return Survey(best, tuple(meshes[place] for place in sorted(meshes)), known)


def _finer(asked: Asked) -> Sequence[PlanRequest]:
    """What is asked, on meshes of more axes than are all tried, where none is named."""
    if asked.options.mesh != AUTO or asked.cluster.num_devices < _MANY_DEVICES:
        return ()
    listed = meshes_of(asked.cluster, asked.options)
    more = replace(asked.options, mesh=f"{AUTO}:{_MOST_AXES}")
    finer = [mesh for mesh in meshes_of(asked.cluster, more) if mesh not in listed]
    try:
        return suited(asked, finer) if finer else ()
    except UnsuitedMeshError:
        return ()


def promising(requests: Sequence[PlanRequest]) -> list[int]:
    """The places of `requests`, of the same cluster, in the order they are tried: on the mesh along
    its levels first, then on those that are the most like it."""

    def unlikeness(place: int) -> float:
        cluster, mesh = requests[place].cluster, requests[place].mesh
        levels, axes = _inner([level.size for level in cluster.levels]), _inner(mesh.sizes)
        return _away(axes, levels) + _away(levels, axes)

    return sorted(range(len(requests)), key=lambda place: (unlikeness(place), place))


def _inner(sizes: Sequence[int]) -> list[float]:
    """How many devices the innermost of `sizes` have, none to all of them, as logarithms."""
    return [log2(prod(sizes[place:])) for place in range(len(sizes) + 1)]


def _away(some: Sequence[float], others: Sequence[float]) -> float:
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
    found = candidate_meshes(cluster, max_axes, in_order=bool(options.asked))
    return tuple(with_buckets(mesh, cluster.device) for mesh in found)


def _failure(say: Say, request: PlanRequest, *, solves: bool) -> InfeasibleError | None:
    """Why there is no plan as it is wanted, or None if there is one; without solving, only what
    leaves something without any choice is told."""
    try:
        if solves:
            best_in_chunks(request, say)
        else:
            limited_classes(request, groups(request.step))
    except InfeasibleError as error:
        return error
    return None


def estimates_of(best: Candidate, solution: Solution) -> StageEstimates:
    """What another plan on the mesh of `best` takes and holds, temporaries included."""
    stage = make_stage(best.request, best.problem, solution)
    return account(best.request, stage).estimates


def planned(found: Survey, margin: Margin | None = None) -> Plan:
    """The plan that a search found best."""
    best, request = found.best, found.best.request
    solution = best.solution
    provenance = found_by(
        request.options,
        solver=solution.solver,
        status=solution.status.value,
        objective_ns=solution.objective,
        bound_ns=solution.bound,
        gap_ppm=round(solution.gap * 1e6),
        meshes_tried=tuple(str(mesh) for mesh in found.meshes),
        imposed=request.describe_imposed(),
        margin=margin,
        statistics={
            key: str(value)
            for key, value in sorted(solution.statistics.items())
            # A plan is the same, byte for byte, however long it took.
            if not key.endswith("_s")
        },
    )
    estimates = of_one_stage(best.estimates)
    return write_plan(
        request.graph, request.cluster, request.options, [best.structure], estimates, provenance
    )


def summary(plan: Plan) -> str:
    """One line on what was found."""
    estimates = plan.estimates
    return (
        f"step {format_ns(estimates.step_ns)}, of which exposed communication "
        f"{format_ns(estimates.exposed_communication_ns)}; as modelled "
        f"{format_ns(plan.provenance.objective_ns)}, {plan.provenance.status}"
    )
