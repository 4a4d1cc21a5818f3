"""The best plan in one stage or in several, as the options say. By default it is in one, and in
several if that does not fit in memory, or if its devices wait for each other, or do the same work,
for long, and several stages take less. Parameters are on hosts if nothing fits otherwise."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.event_prices import is_open
from autopar.cost_model.offloads import why_not_on_host
from autopar.driver.search.finding import Finding
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.infeasible_subset import suited
from autopar.driver.search.meshes import explaining, in_one_stage, meshes_of, survey
from autopar.driver.search.narrower import Widened
from autopar.driver.search.pipelining import search_stages
from autopar.errors import ClusterError, InfeasibleError, SolverError, StageError
from autopar.ir.offloading import can_be_on_host
from autopar.ir.passes.microbatches import trains
from autopar.ir.units import format_ns
from autopar.plans.estimates import LARGE_WAIT
from autopar.plans.provenance import FRAGILE, IN_STAGES
from autopar.plans.requests.options import AUTO, Options
from autopar.plans.requests.request import GraphRequest


def best_of_all(graph_request: GraphRequest, trail: Trail) -> Finding:
    """The best plan, in as many stages as the options say.

    It is in several stages if their number is open and that takes less. Without a request for
    stages, it is in several if one does not fit, or if one is hindered and several take less by
    more than prices err. What is tried then is tried too if their number is open: a wider request
    never gives a longer step. If none fits, parameters may be on hosts (`residency_if_needed`).

    InfeasibleError, with what would do, if none fits.
    """
    if _is_pipeline(graph_request.options):
        try:
            return search_stages(graph_request, trail)
        except InfeasibleError as why:
            best = _best_with_hosts(graph_request, trail, why)
            if best is None:
                raise
            return best
    is_requested = graph_request.options.stages is None
    one = _in_one_stage(graph_request)
    several = graph_request.cluster.num_devices > 1 and trains(graph_request.graph)
    may_be_cut = several and (is_requested or one.options.stages_if_needed)
    # For a margin, a mesh is cut off only once it cannot make the plan fragile.
    margin = FRAGILE if one.options.given.search.margin else 0.0
    widened = Widened(one, trail)
    try:
        for each in widened:
            with widened.attempt() as tried:
                tried.result = survey(each, trail, margin=margin)
        plain = widened.result()
    except (InfeasibleError, ClusterError) as why:
        if may_be_cut:
            trail(f"{why}; looking for stages, each of which holds its own part")
            staged = _in_stages(graph_request, trail)
            if isinstance(staged, Finding):
                return staged
        best = _best_with_hosts(graph_request, trail, why)
        if best is not None:
            return best
        with explaining(one, trail):
            raise
    is_known = not trail.is_stopped
    if is_known and may_be_cut and not is_requested and not is_hindered(plain):
        trail.skip("several stages", f"hindered_ns {graph_request.options.policy.hindered_ns}")
        may_be_cut = False
    elif may_be_cut and trail.why:
        trail.skip("several stages", trail.why)
    if trail.is_stopped:
        return shortest(plain, trail)
    if not may_be_cut:
        return plain
    if not is_requested:
        trail("devices wait, or do the same work, for long; looking for stages, which send less")
    staged = _in_stages(graph_request, trail, plain)
    worth = 1 if is_requested else 1 - graph_request.options.policy.prices_err
    outcome = staged if isinstance(staged, str) else f"the best take {format_ns(staged.step_ns)}"
    if isinstance(staged, str) or staged.step_ns >= worth * plain.step_ns:
        statistics = {**plain.statistics, IN_STAGES: outcome}
        more = () if isinstance(staged, str) else staged.beside
        return replace(plain, statistics=statistics, others=(*plain.others, *more))
    return replace(staged, others=(*staged.others, *plain.beside))


def _best_with_hosts(
    graph_request: GraphRequest, trail: Trail, why: InfeasibleError | ClusterError
) -> Finding | None:
    """The best plan with parameters on hosts, after a search that found none without; None where
    that is not open. InfeasibleError if none fits so either."""
    with_hosts = _with_hosts(graph_request) if isinstance(why, InfeasibleError) else None
    if with_hosts is None:
        return None
    trail.restart()
    trail(f"{why}; looking for plans with parameters on the host")
    try:
        return best_of_all(with_hosts, trail)
    except (ClusterError, StageError, SolverError) as error:
        trail(f"{error}")
        return None


def _with_hosts(graph_request: GraphRequest) -> GraphRequest | None:
    """The request with parameters on hosts, where it is not said where they live and they can be
    there; else None."""
    options, cluster = graph_request.options, graph_request.cluster
    if (
        not (options.residency_if_needed and options.residency == "cuda")
        or options.params_on_host is not None
        or not (cluster.has_host_memory and can_be_on_host(graph_request.graph))
        or why_not_on_host(options.given.optimizer, cluster)
    ):
        return None
    wider = replace(graph_request, options=replace(options, residency=AUTO))
    if _is_pipeline(options):
        return wider
    requests = suited(wider, meshes_of(cluster, wider.options))
    return wider if any(map(is_open, requests)) else None


def _is_pipeline(options: Options) -> bool:
    """Whether the plan has several stages in any case."""
    return options.is_staged and not options.is_number_of_stages_open


def _in_one_stage(graph_request: GraphRequest) -> GraphRequest:
    return replace(graph_request, options=replace(graph_request.options, stages=1))


def shortest(finding: Finding, trail: Trail) -> Finding:
    """The shortest step, as simulated, of a plan in one stage and all others that a search has made
    before it was ended: the best as modelled may be another one."""
    best = min((finding.only, *trail.planned), key=lambda each: each.estimates.step_ns)
    if best.estimates.step_ns >= finding.step_ns:
        return finding
    return in_one_stage(finding.graph_request, best, finding.others).proven(finding.bound_ns)


def is_hindered(finding: Finding) -> bool:
    """Whether a plan in one stage loses much of its step, and long enough. It loses what its ops
    take beyond the best sharding of each alone, without communication."""
    lost_ns = finding.step_ns - sum(int(costs.min()) for costs in finding.only.problem.costs)
    return lost_ns > max(
        LARGE_WAIT * finding.step_ns, finding.graph_request.options.policy.hindered_ns
    )


def _in_stages(
    graph_request: GraphRequest, trail: Trail, plain: Finding | None = None
) -> Finding | str:
    """The best plan in several stages, if there is one and the `plain` one is not as good; else why
    there is not."""
    options = replace(graph_request.options, stages=None, stages_if_needed=False)
    try:
        finding = search_stages(replace(graph_request, options=options), trail, plain)
    except (ClusterError, InfeasibleError, StageError, SolverError) as error:
        trail(f"{error}")
        return "what they take is not known" if isinstance(error, SolverError) else "none is better"
    return "none is better" if finding is plain else finding
