"""The result of a search: the best step, stage by stage, and what is known of other candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import torch

from autopar.cost_model.peak_rows import PeakRows
from autopar.cost_model.price import price
from autopar.ir.fingerprint import fingerprint
from autopar.ir.input_sharding import describe_inputs
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import is_end
from autopar.ir.problem import Status
from autopar.ir.version import __version__
from autopar.plans.decisions import same_choice
from autopar.plans.estimates import Estimates, MicrobatchTimes
from autopar.plans.memory_refinement import Candidate, bounded
from autopar.plans.pipeline_orders import ONE_AFTER_THE_OTHER
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import SCHEMA_VERSION, Plan
from autopar.plans.provenance import CandidateOutcome, Margin, Provenance
from autopar.plans.requests.request import GraphRequest
from autopar.plans.structure import Structure


@dataclass(frozen=True, slots=True)
class Other:
    """Another candidate: none of its plans takes less than `bound_ns`, and `finding` is the best of
    them, if one was planned."""

    name: str
    bound_ns: int
    finding: Finding | None = None
    mesh: Mesh | None = None
    """The mesh of a plan in one stage."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The best step that a search finds for `graph_request`. Its `stages` begin with the modules
    `starts` and have ranks from `first_ranks` on. As modelled it takes `objective_ns`, and none
    takes less than `bound_ns`. In one stage its own mesh is one of the `others`. Its ranks work in
    the order of `schedule`, or of the table of `rows`."""

    graph_request: GraphRequest
    stages: tuple[Candidate, ...]
    estimates: Estimates
    objective_ns: int
    bound_ns: int
    status: str
    others: tuple[Other, ...] = ()
    starts: tuple[str, ...] = ("",)
    first_ranks: tuple[int, ...] = (0,)
    schedule: str = ONE_AFTER_THE_OTHER
    rows: tuple[str, ...] = ()
    imposed: tuple[str, ...] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def step_ns(self) -> int:
        """The step as simulated."""
        return self.estimates.step_ns

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a device."""
        return self.estimates.memory.total

    @property
    def only(self) -> Candidate:
        """The plan of the only stage."""
        (stage,) = self.stages
        return stage

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.stages[0].request.microbatches

    @property
    def meshes(self) -> tuple[str, ...]:
        """The mesh of each stage."""
        return tuple(stage.mesh.text for stage in self.stages)

    @property
    def beside(self) -> tuple[Other, ...]:
        """This finding and its others, as the others of another finding."""
        if len(self.stages) == 1 and self.others:
            return self.others
        name = "one stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        return (Other(name, self.bound_ns, self), *self.others)

    def within(self, limit_bytes: int) -> Finding:
        """The same with another memory limit of devices, which is at least the peak."""
        limit = {"memory_limit": limit_bytes}
        own = [msgspec.structs.replace(each, **limit) for each in self.estimates.stages]
        estimates = msgspec.structs.replace(self.estimates, **limit, stages=tuple(own))
        stages = [
            replace(each, request=each.request.within(limit_bytes), estimates=known)
            for each, known in zip(self.stages, own, strict=True)
        ]
        # Several share what a device has, each with its own limit.
        planned = tuple(stages) if len(stages) == 1 else self.stages
        return replace(self, stages=planned, estimates=estimates)

    def proven(self, bound_ns: int) -> Finding:
        """The same with a proven bound: no plan takes less than `bound_ns`."""
        bound_ns = min(bound_ns, self.objective_ns)
        # Of several stages it is known of the times of segments only.
        is_optimal = bound_ns == self.objective_ns and len(self.stages) == 1
        status = Status.OPTIMAL if is_optimal else Status.FEASIBLE
        return replace(self, bound_ns=bound_ns, status=status.value)

    def longer_ns(self, number: int, modelled_ns: int) -> int:
        """How much longer a step of several stages is, as simulated, if stage `number` takes
        `modelled_ns` as modelled. All parts of that stage are scaled by one factor."""
        stage, estimates = self.stages[number], list(self.estimates.stages)
        times = modelled_ns / max(1, stage.solution.objective)
        own = estimates[number].microbatch
        microbatch = {
            name: round(times * getattr(own, name)) for name in MicrobatchTimes.__struct_fields__
        }
        estimates[number] = msgspec.structs.replace(
            estimates[number], microbatch=MicrobatchTimes(**microbatch)
        )
        known = self.estimates
        table = self.structure.actions
        simulated = simulate_pipeline(table, estimates, known.delays, known.shared)
        return simulated.step_ns - known.step_ns

    @property
    def structure(self) -> Structure:
        """The decisions."""
        graph = self.graph_request.graph
        where = zip(self.stages, self.starts, self.first_ranks, strict=True)
        return Structure(
            model=graph.name,
            fingerprint=fingerprint(graph),
            cluster=self.graph_request.cluster.name,
            optimizer=self.graph_request.options.given.optimizer,
            inputs=describe_inputs(graph),
            stages=tuple(
                msgspec.structs.replace(each.structure, start=start, first_rank=rank)
                for each, start, rank in where
            ),
            schedule=self.schedule,
            schedule_rows=self.rows,
        )

    def plan(
        self, margin: Margin | None = None, candidates: Sequence[CandidateOutcome] = ()
    ) -> Plan:
        """The plan as this version of autopar writes it, with its `margin` and the outcomes of
        `candidates`."""
        options, objective = self.graph_request.options, max(1, self.objective_ns)
        provenance = Provenance(
            autopar=__version__,
            torch=str(torch.__version__),
            solver=self.stages[0].solution.solver,
            status=self.status,
            objective_ns=self.objective_ns,
            bound_ns=self.bound_ns,
            gap_ppm=round(max(0, self.objective_ns - self.bound_ns) / objective * 1e6),
            candidates=tuple(candidates),
            imposed=self.imposed,
            margin=margin,
            # A plan is the same, byte for byte, however long it took.
            statistics={
                key: str(value)
                for key, value in sorted(self.statistics.items())
                if not key.endswith("_s")
            },
            options=options.given,
            policy=options.policy,
        )
        return Plan(SCHEMA_VERSION, self.structure, self.estimates, provenance)


@dataclass(frozen=True)
class StageInStep:
    """Stage `number` of a `step`, to be planned otherwise while the others stay as they are. `best`
    is its plan."""

    step: Finding
    number: int = 0
    known: dict[int, int] = field(default_factory=dict[int, int])
    """The step by how long the stage takes, in nanoseconds."""

    @property
    def name(self) -> str:
        """The stage as a prefix of messages; empty if it is the only one."""
        return f"stage {self.number}: " if len(self.step.stages) > 1 else ""

    @cached_property
    def best(self) -> Candidate:
        """The plan of the stage, in the problem of all plans whose sharding agrees with other
        stages. The search had narrowed it to the choices of its segments."""
        stage = self.step.stages[self.number]
        request, ends = stage.request, {n.key for n in stage.request.graph.nodes if is_end(n)}
        narrowed = tuple(each for each in request.narrowed if each[0] in ends)
        if narrowed == request.narrowed:
            return stage
        wider = replace(request, narrowed=narrowed)
        stated = price(wider)
        choice = same_choice(stage.problem, stage.solution, stated, wider.step)
        problem = PeakRows(wider)(stated, dict.fromkeys(stage.peak_candidates, 0))
        problem = replace(problem, usage_limit=stage.problem.usage_limit)
        # Of the wider problem nothing is proven.
        solution = bounded(replace(stage.solution, choice=choice, basis=None), 0)
        return replace(stage, request=wider, problem=problem, solution=solution)

    def step_ns(self, modelled_ns: int) -> int:
        """The step if the stage takes `modelled_ns`, both as modelled. With several stages, the
        step is simulated anew, and all parts of the stage are scaled by one factor."""
        if len(self.step.stages) == 1:
            return modelled_ns
        if modelled_ns not in self.known:
            longer_ns = self.step.longer_ns(self.number, modelled_ns)
            self.known[modelled_ns] = max(0, self.step.objective_ns + longer_ns)
        return self.known[modelled_ns]
