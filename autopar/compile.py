"""The flow: from a call of a model to the program that every rank runs, in five calls.

    trace      one step of the model, forward and backward, as a graph
    price      what every choice of every op costs on a mesh, in nanoseconds and bytes
    solve      the cheapest choices that fit in memory, with a proven bound
    account    the bill of what was decided, added up again, node by node
    generate   the local graphs of a rank, with their collectives

The three in the middle are made for one mesh, by `best_on`. The search over meshes
(`driver.search.meshes`), which calls that for each mesh worth trying, is handed in as `find`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.codegen import generate
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.peak_rows import with_peak_rows
from autopar.cost_model.price import price
from autopar.ir.gc_pause import collection_paused
from autopar.ir.peak_candidates import ON_HOST, known_in
from autopar.ir.problem import Basis, Problem, Solution
from autopar.ir.sharding import InputSharding
from autopar.plans.decisions import make_stage, resolved_request, same_choice
from autopar.plans.layout import Layout, layouts
from autopar.plans.memory_refinement import (
    MAX_ROUNDS,
    Beaten,
    Candidate,
    CostBreakdown,
    MemoryRefinement,
    bounded,
    infeasible,
)
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest
from autopar.runtime.program.guards import Read
from autopar.runtime.program.program import Program
from autopar.solver import evaluate, least_usage_conflict, solve
from autopar.tracer import OutputFilter, Traced, only_losses, trace

PlanT = TypeVar("PlanT")

Find = Callable[[Traced], Plan]
"""The plan for what was traced: of a search, or one that there is."""

StageContext = Callable[[str], AbstractContextManager[object]]
"""What holds around "trace" and "rewrite"."""

Say = Callable[[str], None]
"""Is told what is being done."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a model. Outputs that `options` or `selects` ask for have gradients beside the
    losses; `input_shardings` says, by position, which inputs come to the ranks in pieces."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options = field(default_factory=Options)
    selects: OutputFilter = only_losses
    input_shardings: Mapping[str, InputSharding] = field(default_factory=dict[str, InputSharding])

    def wants(self, position: int, name: str) -> bool | None:
        """Whether an output is to have a gradient; None if it is left out, where a model trains."""
        if self.model.training and self.options.leaves_out(position, name):
            return None
        return self.options.wants_gradient(position, name) or self.selects(position, name)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A call, compiled: a program for the graph of each stage."""

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
    """The program for a call, under the plan that is found for it."""
    traced, plan = plan_call(call, find, stage)
    with stage("rewrite"):
        return rewritten(traced, plan)


def rewritten(traced: Traced, plan: Plan) -> Compiled:
    """What was traced, with a program for each stage of a plan for it."""
    stages = layouts(traced.graph, plan.structure)
    programs = tuple(generate(traced.gm, traced.graph, stage) for stage in stages)
    return Compiled(traced, plan, programs, stages)


@collection_paused()
def plan_call(
    call: ModelCall, find: Callable[[Traced], PlanT], stage: StageContext = nullcontext
) -> tuple[Traced, PlanT]:
    """The plan, or the plans, found for a call, and the graph they are for."""
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
) -> Candidate:
    """The best plan on one mesh whose peak, temporaries included, is within the memory limit, and
    what it has on the host within the device's share: of all, or of those of `stated`, a part of
    the problem. It is found from the one `after` which it
    comes, of another limit or mesh, or of the step in another form; then not without a limit first.
    InfeasibleError if there is none; Beaten if it is known that none takes less than `cutoff`
    nanoseconds, or if none that does was found without a limit."""
    if stated is None and after is None:
        free = _without_limit(request, say)
        found = _within(free, cutoff)
        if found is not None:
            within = replace(found.problem, usage_limit=request.memory_limit_bytes)
            return replace(found, problem=within)
        if cutoff is not None and free.estimates and free.estimates.modelled_ns >= cutoff:
            raise Beaten(request.name, free.bound)
        say(f"{request.mesh}: memory binds; deciding what to recompute or offload as well")
        request = request.without_savings().opened()
        stated = free.stated if free.request == request else price(request)
        stated = replace(stated, usage_limit=request.memory_limit_bytes)
        known = _refinement(request, stated, say)
        fitting = replace(known, rows=free.rows, bound=free.bound, basis=free.basis)
    else:
        if stated is None:
            request = request.without_savings().opened()
            stated = price(request)
        fitting = _refinement(request, stated, say)
        if after is not None:
            fitting.rows = dict.fromkeys(known_in(request.step, after.peak_candidates), 0)
            # In another number of microbatches a relaxation is solved sooner from nothing.
            is_near = (after.mesh, after.request.microbatches) == (
                request.mesh,
                request.microbatches,
            )
            fitting.basis = after.solution.basis if is_near else None
    found = _within(fitting, cutoff)
    if found is None:
        # Nothing limits the device's memory, but the host's is limited.
        fitting.stated = replace(fitting.stated, usage_limit=request.memory_limit_bytes)
        found = _within(fitting, cutoff)
        assert found is not None
    is_stated = found.problem.usage_limit is not None
    return replace(found, is_tight=is_stated and found.solution.is_limiting)


def check_least(request: PlanRequest) -> None:
    """InfeasibleError if what any plan holds at the least breaks the memory limit: that is known
    without a search."""
    request = request.without_savings().opened()
    stated = replace(price(request), usage_limit=request.memory_limit_bytes)
    conflict = least_usage_conflict(stated)
    if conflict is not None:
        raise infeasible(request.mesh, conflict)


def best_as_stated(
    request: PlanRequest,
    stated: Problem,
    say: Say,
    cutoff: int | None = None,
    start: Basis | None = None,
) -> Candidate:
    """The best plan of a problem as it is `stated`, though more may be held for a moment than that
    says, if what it has on the host is within the device's share. Errors are those of `best_on`."""
    fitting, solved = _refinement(request, stated, say), _solver(request, say, cutoff)
    while True:
        solution = solved(fitting.problem(), start=start)
        fitting.rules_out(solution)
        found, _ = _candidate(request, stated, solution)
        is_over = found.estimates.host_bytes > request.host_memory_bytes
        if not is_over or fitting.rows or stated.usage_limit is None:
            return found
        fitting.rows, start = {ON_HOST: 0}, solution.basis


def _without_limit(request: PlanRequest, say: Say) -> MemoryRefinement:
    """A search for the best plan of all, whatever it holds. What is recomputed is open where chains
    of ops are fused: that may cost less than to write and read it."""
    request, opened = request.without_savings(), request.without_savings().opened()
    if request.options.fuses(request.cluster.device):
        request = replace(request, recompute=opened.recompute)
    return _refinement(request, replace(price(request), usage_limit=None), say)


def _refinement(request: PlanRequest, stated: Problem, say: Say) -> MemoryRefinement:
    return MemoryRefinement(request, stated, partial(with_peak_rows, request), say)


def _within(refinement: MemoryRefinement, cutoff: int | None) -> Candidate | None:
    """The best plan that is within the memory limit; if that is not stated, None where the best of
    all is not."""
    request = refinement.request
    solved = _solver(request, refinement.say, cutoff)
    for _ in range(MAX_ROUNDS):
        problem = refinement.problem()
        rough = problem.usage_limit is not None and not refinement.is_known
        solution = solved(problem, start=refinement.basis, rough=rough)
        refinement.basis = solution.basis or refinement.basis
        if refinement.rules_out(solution):
            continue
        found, bill = _candidate(request, problem, solution)
        if refinement.holds(solution, found.solution, bill) and not solution.is_rough:
            plain, rows = found.problem, refinement.rows
            if request.is_open:
                plain = with_peak_rows(found.request, plain, rows)
            proven = bounded(found.solution, refinement.bound)
            return replace(found, problem=plain, solution=proven, peak_candidates=tuple(rows))
        if problem.usage_limit is None:
            return None
    raise refinement.failure()


def _solver(request: PlanRequest, say: Say, cutoff: int | None) -> Callable[..., Solution]:
    """`solve`, as it is asked of a request."""
    return partial(
        solve,
        time_limit_s=request.options.time_limit_s,
        progress=say,
        cutoff=cutoff,
        tolerance=request.tolerance,
    )


def _candidate(
    request: PlanRequest, problem: Problem, solution: Solution
) -> tuple[Candidate, CostBreakdown]:
    """The plan that a solution is, and its cost breakdown. Nothing is open any more about what is
    recomputed, or offloaded: the step has just the copies that `solution` wants, and is priced
    so."""
    if request.is_open:
        stated, request = problem, resolved_request(request, problem, solution)
        problem = price(request)
        choice = same_choice(stated, solution, problem, request.step)
        found = evaluate(problem, choice)
        solution = replace(solution, choice=choice, arcs=found.arcs, objective=found.objective)
    structure = make_stage(request, problem, solution)
    bill = cost_breakdown(request, structure)
    held = bill.microbatch_memory
    return Candidate(request, problem, structure, bill.estimates, held, solution), bill


@contextmanager
def _recording(model: nn.Module) -> Generator[None, None, None]:
    """With gradients wherever a parameter is trained, though the call may be under `torch.no_grad`:
    a model is stored in one way, and training decides which."""
    trained = torch.is_grad_enabled() or any(x.requires_grad for x in model.parameters())
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        yield
