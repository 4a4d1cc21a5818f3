"""The search: price and solve on every mesh worth trying, and keep the best plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from autopar.cluster.mesh_shapes import candidate_meshes, parse_mesh
from autopar.cost_model.account import account
from autopar.cost_model.liveness import residence
from autopar.cost_model.price import choices, price
from autopar.driver.decisions import describe_conflict, make_structure
from autopar.driver.infeasible_subset import describe_imposed, explain, suited
from autopar.errors import ClusterError, InfeasibleError, SolverError
from autopar.ir.gc_pause import collection_paused
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.problem import Problem, Solution, Status
from autopar.ir.units import format_bytes, format_ns
from autopar.ir.uses import groups
from autopar.ir.version import __version__
from autopar.plans.layout import parse_layout
from autopar.plans.options import Options
from autopar.plans.plan import SCHEMA_VERSION, Estimates, Margin, Plan, Provenance, Structure
from autopar.plans.request import PlanRequest
from autopar.plans.strategies import MAX_AXES
from autopar.solver import solve

MAX_TIGHTENINGS = 8
"""How often a solve is repeated because temporaries, which the problem does not count, pushed the
peak over the limit."""


_AXES = 2
"""How many axes meshes have that are tried unasked: each with three takes as long as all others."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan found on one mesh, and the problem that it solves: the one stated, with what
    temporaries need set aside."""

    request: PlanRequest
    problem: Problem
    structure: Structure
    estimates: Estimates
    solution: Solution

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies."""
        return self.request.mesh


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of one mesh: no plan on it takes less than `bound` nanoseconds, and `found` is
    the best of them, unless the mesh was cut off."""

    mesh: Mesh
    bound: int
    found: Candidate | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What a search found: the best plan of all, and what is known of each mesh on which there are
    plans, in the order of `meshes`."""

    best: Candidate
    meshes: tuple[Mesh, ...]
    tried: tuple[Tried, ...]
    imposed: tuple[str, ...]


class Beaten(Exception):
    """A mesh has no plan as good as the one in hand; `bound` is below all of its plans."""

    def __init__(self, mesh: Mesh, bound: int) -> None:
        super().__init__(f"{mesh}: at least {format_ns(bound)}, which is no better")
        self.bound = bound


def search(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    *,
    torch_version: str,
    progress: Callable[[str], None],
) -> Plan:
    """The plan with the shortest predicted step over all meshes that `options` admit; errors are
    those of `survey`."""
    found = survey(graph, cluster, options, progress=progress)
    return planned(found, torch_version)


def survey(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    *,
    progress: Callable[[str], None],
    margin: float = 0.0,
) -> Survey:
    """The best plan over all meshes that `options` admit, and what is known of the others.

    Meshes along the levels of the cluster come first: a good plan in hand cuts off the others as
    soon as they are known to have no better one, or none within `margin` (a fraction) of it. Of
    equally good meshes the first that is listed wins. InfeasibleError, saying what is missing on
    the first mesh, if none has a plan within the memory limit.
    """
    meshes = suited(graph, _meshes(cluster, options), options)
    best: Candidate | None = None
    best_place, tried = 0, dict[int, Tried]()
    failures: dict[int, InfeasibleError] = {}
    for place in _promising(meshes, cluster):
        mesh = meshes[place]
        progress(f"solving for mesh {mesh or 'of one device'}")
        least = None if best is None else best.solution.objective + (place < best_place)
        cutoff = None if least is None else least + int(least * margin)
        try:
            found = solve_mesh(PlanRequest(graph, cluster, mesh, options), progress, cutoff)
        except InfeasibleError as error:
            failures[place] = error
            continue
        except Beaten as beaten:
            progress(f"{beaten}")
            tried[place] = Tried(mesh, beaten.bound, None)
            continue
        tried[place] = Tried(mesh, found.solution.bound, found)
        if least is None or found.solution.objective < least:
            best, best_place = found, place
    if best is None:
        if not options.asked:
            raise failures[min(failures)]
        progress("looking for the limits that conflict")
        raise explain(
            options, partial(_failure, PlanRequest(graph, cluster, meshes[0], options), progress)
        )
    known = tuple(tried[place] for place in sorted(tried))
    bound = min(each.bound for each in known)
    best = replace(best, solution=_bounded(best.solution, bound))
    return Survey(best, tuple(meshes), known, describe_imposed(graph, best.mesh, options))


def _promising(meshes: Sequence[Mesh], cluster: Cluster) -> list[int]:
    """The places of `meshes` in the order they are tried."""
    levels = tuple(level.size for level in cluster.levels if level.size > 1)

    def is_other(place: int) -> bool:
        return tuple(axis.size for axis in meshes[place].axes) != levels

    return sorted(range(len(meshes)), key=lambda place: (is_other(place), place))


def _meshes(cluster: Cluster, options: Options) -> Sequence[Mesh]:
    word, colon, number = options.mesh.partition(":")
    if word != "auto":
        return (parse_mesh(options.mesh, cluster),)
    if colon and not (number.isdecimal() and number.isascii()):
        raise ClusterError(f"mesh {options.mesh!r}: write auto:3 for meshes of up to three axes")
    max_axes = int(number) if colon else max(_AXES, MAX_AXES.get(options.strategy, 1))
    return candidate_meshes(cluster, max_axes, in_order=bool(options.asked))


def _failure(
    request: PlanRequest, progress: Callable[[str], None], options: Options, *, solves: bool
) -> InfeasibleError | None:
    """Why there is no plan under `options`, or None if there is one; without solving, only what
    leaves something without any choice is told."""
    request = replace(request, options=options)
    try:
        if solves:
            solve_mesh(request, progress)
        else:
            choices(request, groups(request.graph))
    except InfeasibleError as error:
        return error
    return None


def solve_mesh(
    request: PlanRequest, progress: Callable[[str], None], cutoff: int | None = None
) -> Candidate:
    """The best plan on the mesh whose peak, temporaries included, is within the memory limit;
    Beaten if it is known that none takes less than `cutoff` nanoseconds.

    The problem counts what is held when the forward phase ends. Temporaries on top of it are known
    only once the plan is: where they break the limit, they are set aside and the problem is solved
    again with what is left.
    """
    return within_memory(request, price(request), progress, cutoff)


def within_memory(
    request: PlanRequest,
    stated: Problem,
    progress: Callable[[str], None],
    cutoff: int | None = None,
) -> Candidate:
    """The best plan of `stated`, the problem of `request` or a part of it, whose peak is within the
    memory limit. Errors are those of `solve_mesh`."""
    mesh, options, limit = request.mesh, request.options, request.memory_limit_bytes
    problem, solution = stated, _solve(stated, mesh, options, progress, cutoff)
    if solution.status is Status.INFEASIBLE:
        raise InfeasibleError(f"mesh {mesh or 'of one device'}: {describe_conflict(solution)}")
    bound = solution.bound
    for attempt in count():
        structure = make_structure(request, stated, solution)
        estimates = account(request, structure)
        if estimates.step_ns != solution.objective:
            raise SolverError(
                f"mesh {mesh}: the plan costs {estimates.step_ns} ns by its own bill and "
                f"{solution.objective} ns by the solver's; this is a defect of autopar"
            )
        excess = estimates.memory.total - limit
        if excess <= 0:
            return Candidate(request, problem, structure, estimates, _bounded(solution, bound))
        progress(f"{mesh}: temporaries exceed the memory limit; solving again with less")
        counted = sum(int(u[c]) for u, c in zip(stated.usages, solution.choice, strict=True))
        leaner = _leaner(stated, counted - excess, counted, mesh, options, progress, cutoff)
        if leaner is None or attempt == MAX_TIGHTENINGS:
            raise InfeasibleError(
                f"mesh {mesh or 'of one device'}: the leanest plan found peaks at "
                f"{format_bytes(limit + excess)} per device, {format_bytes(excess)} over the "
                f"memory limit of {format_bytes(limit)}; "
                f"{format_bytes(estimates.memory.transient)} of it is temporary. Raise "
                "--memory-limit, use more devices, or lower the batch"
            )
        problem, solution = leaner
    raise AssertionError("the loop ends in a plan or an error")


@collection_paused()
def peak(best: Candidate, solution: Solution) -> int:
    """Bytes per device at the peak, temporaries included, of another plan on the mesh of `best`."""
    graph, options = best.request.graph, best.request.options
    layout = parse_layout(graph, make_structure(best.request, best.problem, solution))
    return residence(layout, best.mesh, groups(graph), options).memory.total


def _solve(
    problem: Problem,
    mesh: Mesh,
    options: Options,
    progress: Callable[[str], None],
    cutoff: int | None,
) -> Solution:
    solution = solve(problem, time_limit_s=options.time_limit_s, progress=progress, cutoff=cutoff)
    if solution.status is Status.BEATEN:
        raise Beaten(mesh, solution.bound)
    if solution.status is Status.LIMIT:
        raise SolverError(f"mesh {mesh}: no plan was found in time; raise the time limit")
    return solution


def _leaner(
    stated: Problem,
    allowance: int,
    counted: int,
    mesh: Mesh,
    options: Options,
    progress: Callable[[str], None],
    cutoff: int | None,
) -> tuple[Problem, Solution] | None:
    """The problem of the best plan that holds at most `allowance`, or else as little as any,
    and that plan; None if that is no less than `counted`, what the plan in hand holds. Leaner plans
    may have other temporaries: that one breaks the limit does not mean that all do."""
    while allowance < counted:
        problem = replace(stated, usage_limit=allowance)
        solution = _solve(problem, mesh, options, progress, cutoff)
        if solution.status is not Status.INFEASIBLE:
            return problem, solution
        if solution.conflict is None:
            return None
        allowance = max(allowance + 1, solution.conflict.needed)
    return None


def _bounded(solution: Solution, bound: int) -> Solution:
    """`solution` with a bound on more plans than those it was chosen from: those of the problem as
    it was stated, before temporaries were set aside, or those on other meshes."""
    bound = min(bound, solution.objective)
    status = Status.OPTIMAL if bound == solution.objective else Status.FEASIBLE
    return replace(solution, status=status, bound=bound)


def planned(found: Survey, torch_version: str, margin: Margin | None = None) -> Plan:
    """The plan that a search found best."""
    best = found.best
    solution = best.solution
    return Plan(
        schema=SCHEMA_VERSION,
        structure=best.structure,
        estimates=best.estimates,
        provenance=Provenance(
            autopar=__version__,
            torch=torch_version,
            solver=solution.solver,
            status=solution.status.value,
            objective_ns=solution.objective,
            bound_ns=solution.bound,
            gap_ppm=round(solution.gap * 1e6),
            meshes_tried=tuple(str(mesh) for mesh in found.meshes),
            imposed=found.imposed,
            margin=margin,
            statistics={
                key: str(value)
                for key, value in sorted(solution.statistics.items())
                # A plan is the same, byte for byte, however long it took.
                if not key.endswith("_s")
            },
        ),
    )


def summary(plan: Plan) -> str:
    """One line on what was found."""
    estimates = plan.estimates
    return (
        f"step {format_ns(estimates.step_ns)}, of which communication "
        f"{format_ns(estimates.communication_ns)}; {plan.provenance.status}"
    )
