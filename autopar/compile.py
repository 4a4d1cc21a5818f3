"""The flow: from a call of a model to the program that every rank runs, in five steps.

    trace      one step of the model, forward and backward, as a graph
    price      what every choice of every op costs on a mesh, in nanoseconds and bytes
    solve      the cheapest choices that fit in memory, with a proven bound
    account    the cost breakdown of what was decided, added up anew, node by node
    generate   the local graphs of a rank, with their collectives

`best_on` does the three in the middle, for one mesh. The search over meshes
(`driver.search.meshes`) calls it for each mesh worth trying, and is passed in as `find`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.codegen import generate
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.least_memory import least_after_forward, least_at_ops
from autopar.cost_model.peak_rows import PeakRows
from autopar.cost_model.price import price
from autopar.errors import InfeasibleError
from autopar.ir.gc_pause import collection_paused
from autopar.ir.peak_candidates import ON_HOST, known_in
from autopar.ir.problem import Basis, Problem, Solution, Status
from autopar.ir.sharding import InputSharding
from autopar.ir.units import format_ns
from autopar.plans.decisions import make_stage, resolved_request, same_choice
from autopar.plans.layout import Layout, layouts
from autopar.plans.memory_refinement import (
    MAX_ROUNDS,
    Beaten,
    Candidate,
    CostBreakdown,
    MemoryBinds,
    MemoryRefinement,
    bounded,
    infeasible,
    over_limit_at,
)
from autopar.plans.plan import Plan
from autopar.plans.provenance import PROVEN, SearchStep
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest
from autopar.plans.work import plan_ns, price_ns
from autopar.runtime.program.guards import Read
from autopar.runtime.program.program import Program
from autopar.solver import evaluate, least_usage_conflict, solve
from autopar.tracer import OutputFilter, Traced, only_losses, trace

PlanT = TypeVar("PlanT")

Find = Callable[[Traced], Plan]
"""The plan for a traced call: the result of a search, or a stored plan."""

StageContext = Callable[[str], AbstractContextManager[object]]
"""The context manager around a stage of the flow, "trace" or "rewrite"."""

Say = Callable[[str], None]
"""Reports progress, a line at a time."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a model. Beside the losses, outputs that `options` or `selects` name have
    gradients. `input_shardings` says, by position, which inputs ranks pass as shards."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options = field(default_factory=Options)
    selects: OutputFilter = only_losses
    input_shardings: Mapping[str, InputSharding] = field(default_factory=dict[str, InputSharding])

    def wants(self, position: int, name: str) -> bool | None:
        """Whether an output has a gradient; None if it is left out, as the model trains and the
        script does not read it."""
        if self.model.training and self.options.leaves_out(position, name):
            return None
        return self.options.wants_gradient(position, name) or self.selects(position, name)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled call: the graph, the plan, and a program for each stage."""

    traced: Traced
    plan: Plan
    programs: tuple[Program, ...]
    layouts: tuple[Layout, ...]

    @property
    def program(self) -> Program:
        """The program of a plan with one stage."""
        (program,) = self.programs
        return program


def compile_call(call: ModelCall, find: Find, stage: StageContext = nullcontext) -> Compiled:
    """The program for a call, under the plan that `find` returns."""
    traced, plan = plan_call(call, find, stage)
    with stage("rewrite"):
        return rewritten(traced, plan)


def rewritten(traced: Traced, plan: Plan) -> Compiled:
    """The traced call with a program for each stage of `plan`."""
    stages = layouts(traced.graph, plan.structure)
    programs = tuple(generate(traced.gm, traced.graph, stage) for stage in stages)
    return Compiled(traced, plan, programs, stages)


@collection_paused()
def plan_call(
    call: ModelCall, find: Callable[[Traced], PlanT], stage: StageContext = nullcontext
) -> tuple[Traced, PlanT]:
    """The traced call, and the plan or plans that `find` returns for it."""
    with stage("trace"), _recording(call.model):
        traced = trace(
            call.model,
            call.args,
            call.kwargs,
            strict=call.options.given.search.strict,
            selects=call.wants,
            input_shardings=call.input_shardings,
        )
        if call.options.given.outputs.unread:
            mode = Read(call.model, "training", "the model's training mode")
            traced = replace(traced, reads=(*traced.reads, mode))
    return traced, find(traced)


def best_on(
    request: PlanRequest,
    say: Say,
    cutoff: int | None = None,
    stated: Problem | None = None,
    after: Candidate | None = None,
    free: MemoryRefinement | None = None,
    is_probe: bool = False,
) -> Candidate:
    """The best plan on one mesh that is within two limits: its peak, temporaries included, within
    the memory limit, and its memory on the host within the device's share.

    `stated` limits the search to a part of the problem. The search starts from the plan `after`, if
    given: a plan for another limit or mesh, or for the step in another form. With `stated` or
    `after` it skips the first solve, which has no memory limit. It does so too with the search
    `free` that a `MemoryBinds` had, of the same step or of one in another form.

    InfeasibleError if there is none. Beaten if no plan takes less than `cutoff` nanoseconds, or if
    the solve without a limit finds none that does. MemoryBinds, if it `is_probe`, once that solve's
    plan does not fit.
    """
    free_ns = 0
    is_same = free is None or free.request.name == request.name
    if stated is None and after is None and is_same:
        if free is None:
            free = _without_limit(request, say)
            best = _within(free, cutoff)
            if best is not None:
                within = replace(best.problem, usage_limit=request.memory_limit_bytes)
                return replace(best, problem=within)
        if cutoff is not None and free.estimates and free.estimates.modelled_ns >= cutoff:
            raise Beaten(request.name, free.bound)
        if is_probe:
            raise MemoryBinds(free)
        free_ns = free.estimates.modelled_ns if free.estimates else 0
        say(f"{request.mesh}: memory binds; deciding what to recompute or offload as well")
        request = request.without_savings().opened()
        stated = free.stated if free.request == request else price(request)
        stated = replace(stated, usage_limit=request.memory_limit_bytes)
        known = _refinement(request, stated, say)
        refinement = replace(known, rows=free.rows, bound=free.bound, basis=free.basis)
    else:
        if stated is None:
            request = request.without_savings().opened()
            stated = price(request)
        refinement = _refinement(request, stated, say)
        known_rows = after.peak_candidates if after else free.rows if free else ()
        refinement.rows = dict.fromkeys(known_in(request.step, known_rows), 0)
        if after is not None:
            if after.mesh == request.mesh:
                refinement.guess = {each: after.peak_candidates[each] for each in refinement.rows}
            # With another number of microbatches, a relaxation is solved sooner from scratch.
            is_near = (after.mesh, after.request.microbatches) == (
                request.mesh,
                request.microbatches,
            )
            refinement.basis = after.solution.basis if is_near else None
    best = _within(refinement, cutoff)
    if best is None:
        # The device's memory is not limited, but the host's is.
        refinement.stated = replace(refinement.stated, usage_limit=request.memory_limit_bytes)
        best = _within(refinement, cutoff)
        assert best is not None
    is_stated = best.problem.usage_limit is not None
    costs_time = best.solution.objective * (1 - PROVEN) > free_ns
    is_tight = is_stated and best.solution.is_limiting and costs_time
    return replace(best, is_tight=is_tight)


def check_surely(request: PlanRequest) -> None:
    """InfeasibleError if memory is over the limit during some op, or when forward ends, whatever is
    decided. It takes no prices."""
    request = request.without_savings()
    at_ops = ((num_bytes, -index) for num_bytes, index in least_at_ops(request))
    least, index = max(at_ops, default=(0, 0))
    if least > request.memory_limit_bytes:
        where = f"at {request.step.nodes[-index].key}"
        raise over_limit_at(request.name, where, least, request.memory_limit_bytes)
    least = least_after_forward(request)
    if least > request.memory_limit_bytes:
        where = "when forward ends"
        raise over_limit_at(request.name, where, least, request.memory_limit_bytes)


def check_least(request: PlanRequest) -> None:
    """InfeasibleError if even the least memory of any plan is over the limit. It takes no
    search."""
    request = request.without_savings().opened()
    stated = replace(price(request), usage_limit=request.memory_limit_bytes)
    conflict = least_usage_conflict(stated)
    if conflict is not None:
        raise infeasible(request.name, conflict)


def best_as_stated(
    request: PlanRequest,
    stated: Problem,
    say: Say,
    cutoff: int | None = None,
    start: Basis | None = None,
) -> Candidate:
    """The best plan of a problem as it is `stated`, within the device's share of the host's memory.
    Its peak may be over what the problem counts. Errors are those of `best_on`."""
    refinement, solved = _refinement(request, stated, say), _solver(request, say, cutoff)
    while True:
        solution = solved(refinement.problem(), start=start)
        refinement.rules_out(solution, cutoff)
        candidate, _ = _candidate(request, stated, solution, say)
        is_over = candidate.estimates.host_bytes > request.host_memory_bytes
        if not is_over or refinement.rows or stated.usage_limit is None:
            return candidate
        refinement.rows, start = {ON_HOST: 0}, solution.basis


def _without_limit(request: PlanRequest, say: Say) -> MemoryRefinement:
    """A search for the best plan whatever its memory. What is recomputed is open where chains of
    ops are fused: to recompute may cost less than to write and read."""
    request, opened = request.without_savings(), request.without_savings().opened()
    if request.options.fuses(request.cluster.device):
        request = replace(request, recompute=opened.recompute)
    return _refinement(request, replace(price(request), usage_limit=None), say)


def _refinement(request: PlanRequest, stated: Problem, say: Say) -> MemoryRefinement:
    work_ns = price_ns(request.step, stated)
    say(SearchStep(f"{request.name}: priced", work_ns=work_ns, may_end=True))
    return MemoryRefinement(request, stated, PeakRows(request), say)


def _within(refinement: MemoryRefinement, cutoff: int | None) -> Candidate | None:
    """The best plan within the memory limit. Without a limit in the problem, None if the best plan
    of all is over it. A search that would take long looks for a rough plan that fits first, reports
    it (`SearchStep.plan`), and then looks for a better one."""
    request, rough = refinement.request, None
    for number in range(MAX_ROUNDS):
        if number:
            refinement.say(SearchStep(f"{request.name}: round {number + 1}", may_end=True))
        problem = refinement.problem()
        is_quick = problem.usage_limit is not None and not refinement.is_thorough
        solved = _solver(request, refinement.say, cutoff)
        try:
            solution = solved(problem, start=refinement.basis, rough=is_quick)
            if rough is not None and solution.status is Status.LIMIT:
                return rough
            refinement.basis = solution.basis or refinement.basis
            if refinement.rules_out(solution, cutoff) or refinement.takes_guess(solution):
                continue
        except (Beaten, InfeasibleError) as why:
            if rough is None:
                raise
            bound = why.bound if isinstance(why, Beaten) else rough.solution.bound
            return replace(rough, solution=bounded(rough.solution, bound))
        candidate, breakdown = _candidate(request, problem, solution, refinement.say)
        if refinement.holds(solution, candidate.solution, breakdown):
            within, objective = _bounded(candidate, refinement), candidate.solution.objective
            if not solution.is_rough:
                return within
            if cutoff is None or objective < cutoff:
                rough, cutoff = within, objective
                text = f"{request.name}: a first plan that fits, {format_ns(objective)}"
                refinement.say(SearchStep(text, plan=within))
        if problem.usage_limit is None:
            return None
    if rough is not None:
        return rough
    raise refinement.failure()


def _bounded(candidate: Candidate, refinement: MemoryRefinement) -> Candidate:
    """A plan that fits, with the bound on all plans, and the rows that say why it does."""
    plain, rows = candidate.problem, refinement.rows
    if refinement.request.is_open:
        plain = PeakRows(candidate.request)(plain, rows)
    proven = replace(bounded(candidate.solution, refinement.bound), is_rough=False)
    return replace(candidate, problem=plain, solution=proven, peak_candidates=rows)


def _solver(request: PlanRequest, say: Say, cutoff: int | None) -> Callable[..., Solution]:
    """`solve` with the settings of a request."""

    def solved(problem: Problem, **how: Any) -> Solution:
        solution = solve(
            problem,
            time_limit_s=request.options.time_limit_s,
            progress=lambda text: say(f"{request.name}: {text}"),
            cutoff=cutoff,
            tolerance=request.tolerance,
            **how,
        )
        work_ns = int(solution.statistics.pop("work_ns"))
        say(SearchStep(f"{request.name}: solved, {solution.status}", work_ns=work_ns))
        return solution

    return solved


def _candidate(
    request: PlanRequest, problem: Problem, solution: Solution, say: Say
) -> tuple[Candidate, CostBreakdown]:
    """The plan of a solution, and its cost breakdown. Recompute and offload are decided from here
    on: the step has just the copies that `solution` uses, and prices follow from that."""
    say(SearchStep(f"{request.name}: simulating the plan", work_ns=plan_ns(request.step)))
    if request.is_open:
        stated, request = problem, resolved_request(request, problem, solution)
        problem = price(request)
        choice = same_choice(stated, solution, problem, request.step)
        evaluation = evaluate(problem, choice)
        solution = replace(
            solution, choice=choice, arcs=evaluation.arcs, objective=evaluation.objective
        )
    structure = make_stage(request, problem, solution)
    breakdown = cost_breakdown(request, structure)
    held = breakdown.microbatch_memory
    return Candidate(request, problem, structure, breakdown.estimates, held, solution), breakdown


@contextmanager
def _recording(model: nn.Module) -> Generator[None, None, None]:
    """With gradients wherever a parameter is trained, even if the call is under `torch.no_grad`. A
    model is stored in one way, and training decides which."""
    trained = torch.is_grad_enabled() or any(x.requires_grad for x in model.parameters())
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        yield
