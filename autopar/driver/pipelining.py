"""Plans in stages: where to cut, each stage's own plan on its part of the cluster, and the order in
which the stages work.

For a number of stages and microbatches the whole model is planned on one part of the cluster first,
which gives the mesh and what each segment takes. From that the cuts follow (`solver.cutting`). Then
each stage is planned on that mesh, within the memory that its microbatches in flight leave, one
after the other: what it is sent lies as the one that sends it has it. The step is that of all
stages played together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import msgspec
import torch

from autopar.cluster.parts import line_of, part_of
from autopar.compile import Say
from autopar.cost_model.pipeline import add_up
from autopar.cost_model.played import play_step
from autopar.cost_model.segment_costs import SegmentCost, segment_costs
from autopar.cost_model.sends import delays
from autopar.driver.pipeline_shapes import (
    PipelineShape,
    imposed_on,
    numbers_of_microbatches,
    numbers_of_ranks,
    other_orders,
    shaped,
)
from autopar.driver.search import search, survey
from autopar.errors import InfeasibleError, StageError
from autopar.ir.cutting import CutProblem, Way
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph, Role
from autopar.ir.microbatches import in_microbatches
from autopar.ir.segments import Segment, segments
from autopar.ir.sharding import Sharding
from autopar.ir.stages import RECEIVE, SEND, cut_at, in_stages
from autopar.ir.units import format_ns
from autopar.ir.version import __version__
from autopar.plans.compatibility import describe_inputs
from autopar.plans.estimates import Estimates
from autopar.plans.fitting import Candidate
from autopar.plans.layout import parse_layout
from autopar.plans.matching import general
from autopar.plans.plan import (
    SCHEMA_VERSION,
    MeshAxis,
    Plan,
    Provenance,
    Stage,
    Structure,
)
from autopar.plans.request import Asked
from autopar.solver.cutting import divide


def search_stages(asked: Asked, say: Say) -> Plan:
    """The plan with the shortest step among those that are asked for, in one stage too where their
    number is open. StageError if the model cannot be cut so; InfeasibleError if nothing fits in
    memory."""
    options = asked.options
    tried = _Tried(asked, say)
    if options.stages is None and not options.cuts:
        plain = replace(options, stages=1, microbatches=None)
        tried.offer(lambda: search(replace(asked, options=plain), say))
    for ranks in numbers_of_ranks(asked):
        last: int | None = None
        for count in numbers_of_microbatches(asked, ranks):
            shape = shaped(options, ranks, count)
            found = tried.offer(partial(_planned, asked, shape, say))
            if last is not None and (found is None or found > last):
                break
            last = found
    if tried.best is not None:
        for shape in other_orders(options, tried.best):
            tried.offer(partial(_planned, asked, shape, say))
    return tried.found()


def _planned(asked: Asked, shape: PipelineShape, say: Say) -> Plan:
    return _Pipeline(asked, shape, say).plan()


class _Tried:
    """The best plan so far, and why there was none where there was none."""

    def __init__(self, asked: Asked, say: Say) -> None:
        self.asked, self.say = asked, say
        self.best: Plan | None = None
        self.failure: Exception | None = None

    def offer(self, make: Callable[[], Plan]) -> int | None:
        """How long the step of a plan takes, if there is one."""
        try:
            plan = make()
        except (InfeasibleError, StageError) as error:
            self.say(str(error))
            self.failure = self.failure or error
            return None
        step_ns = plan.estimates.step_ns
        self.say(f"step {format_ns(step_ns)}")
        if self.best is None or step_ns < self.best.estimates.step_ns:
            self.best = plan
        return step_ns

    def found(self) -> Plan:
        """The best plan; the first failure if there is none."""
        if self.best is None:
            raise self.failure or StageError("the devices are not shared by as many stages")
        return self.best


@dataclass(frozen=True, slots=True)
class _Proof:
    """The mesh of a stage, and how long the cuts take, and any cuts at least, as the program has it
    that chose them (`ir.cutting`): 0 where they were given."""

    mesh: str
    objective_ns: int = 0
    bound_ns: int = 0

    @property
    def gap_ppm(self) -> int:
        """By which part of the step another choice may be better, in millionths."""
        if not self.objective_ns:
            return 1_000_000
        return max(0, round((1 - self.bound_ns / self.objective_ns) * 1e6))


class _Pipeline:
    """One shape, planned."""

    def __init__(self, asked: Asked, shape: PipelineShape, say: Say) -> None:
        self.asked, self.shape, self.say = asked, shape, say
        self.cluster = part_of(asked.cluster, asked.cluster.num_devices // shape.ranks)
        self.graph = in_microbatches(asked.graph, shape.microbatches)
        self.table = shape.table
        stages = range(self.table.num_stages)
        self.in_flight = tuple(self.table.in_flight(stage) for stage in stages)
        self.ranks = tuple(self.table.ranks[stage] for stage in stages)
        self.limit = asked.options.memory_limit_bytes or asked.cluster.device.memory_bytes

    def plan(self) -> Plan:
        """The plan with the best cuts, or those that are given."""
        self.say(f"planning {self.shape} ({self.shape.schedule})")
        whole = self._whole()
        starts, proof = self._cuts(whole)
        graphs = in_stages(self.graph, [start for _, start in starts])
        found = self._stages(graphs, whole.mesh.text)
        layouts = [
            parse_layout(graph, each.structure) for graph, each in zip(graphs, found, strict=True)
        ]
        ranks = self.shape.ranks
        sends = delays(layouts, line_of(self.asked.cluster, ranks) if ranks > 1 else None)
        estimates = add_up(self.table, [each.estimates for each in found], sends)
        return self._written(["", *(module for module, _ in starts)], found, estimates, proof)

    def _whole(self) -> Candidate:
        """The model, its loss whole, on one part of the cluster with the memory of all ranks."""
        options = replace(
            self.asked.options,
            microbatches=self.shape.microbatches,
            loss_chunks=1,
            memory_limit_bytes=self.shape.ranks * self.limit,
        )
        held = -(-self.table.held(0) // (self.table.num_stages // self.shape.ranks))
        asked = replace(self.asked, cluster=self.cluster, options=options, in_flight=held)
        try:
            return survey(asked, self.say).best
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{self.shape}: with the memory of {self.shape.ranks} ranks together, {error}"
            ) from error

    def _cuts(self, whole: Candidate) -> tuple[list[tuple[str, int]], _Proof]:
        """The module and the op with which each stage but the first begins, and how good that is
        known to be."""
        if self.asked.options.cuts:
            starts = [(module, cut_at(self.graph, module)) for module in self.asked.options.cuts]
            return starts, _Proof(str(whole.mesh))
        step = play_step(whole.request, whole.structure)
        parts = segments(self.graph)
        if len(parts) < len(self.ranks):
            raise StageError(
                f"{len(self.ranks)} stages are more than the model has parts: {len(parts)}"
            )
        costs = segment_costs(step, self.graph, parts, self.asked.options)
        sorts = [
            list(group)
            for _, group in groupby(
                zip(parts, costs, strict=True), key=lambda each: general(each[0].module)
            )
        ]
        problem = CutProblem(
            tuple(map(len, sorts)),
            tuple((_way(sort),) for sort in sorts),
            self.ranks,
            self.in_flight,
            self.shape.microbatches,
            self.limit,
        )
        found = divide(problem)
        proof = _Proof(str(whole.mesh), round(found.step_ns(problem)), found.bound_ns)
        if self.table.is_split:
            # The cuts are those for whole backwards, of which others are no bound.
            proof = _Proof(str(whole.mesh))
        return [(parts[k].module, parts[k].start) for k in found.starts], proof

    def _stages(self, graphs: Sequence[Graph], mesh: str) -> list[Candidate]:
        """The plan of each stage. Those that differ from another in nothing but the names of their
        parameters are planned as that one."""
        ends: dict[tuple[str, str], str] = {}
        found: list[Candidate] = []
        known: dict[object, Candidate] = {}
        options = replace(
            self.asked.options,
            mesh=mesh,
            microbatches=self.shape.microbatches,
        )
        stored: dict[str, Sharding] = {}
        for stage, graph in enumerate(graphs):
            pins = tuple(sorted(_pins(graph, ends)))
            tied = [node.target for node in graph.with_role(Role.PARAM) if node.target in stored]
            limit = self.limit // self.ranks.count(self.ranks[stage])
            own = replace(options, memory_limit_bytes=limit)
            alike = own.for_stored(mesh, {name: stored[name] for name in tied})
            others = self.table.others(stage)
            asked = replace(
                self.asked,
                graph=graph,
                cluster=self.cluster,
                options=own.joined(alike) if tied else own,
                in_flight=1 + max(each.backward for each in others),
                others=others if self.table.is_split else (),
                ends=pins,
            )
            key = _signature(graph), limit, others, pins, tuple(tied)
            if key not in known:
                self.say(f"planning stage {stage} of {len(graphs)}")
                known[key] = survey(asked, self.say).best
            found.append(_renamed(known[key], graph))
            ends |= _laid_out(graph, found[-1].structure)
            params = found[-1].structure.params.items()
            stored = {name: param.choice.storage for name, param in params} | stored
        return found

    def _written(
        self,
        starts: Sequence[str],
        found: Sequence[Candidate],
        estimates: Estimates,
        proof: _Proof,
    ) -> Plan:
        asked, shape = self.asked, self.shape
        devices = self.cluster.num_devices
        stages = tuple(
            Stage(start, self.ranks[k] * devices, each.structure)
            for k, (start, each) in enumerate(zip(starts, found, strict=True))
        )
        structure = Structure(
            model=asked.graph.name,
            fingerprint=fingerprint(asked.graph),
            cluster=asked.cluster.name,
            axes=(MeshAxis("stage", shape.ranks),) if shape.ranks > 1 else (),
            optimizer=asked.options.optimizer,
            inputs=describe_inputs(asked.graph),
            params={},
            ops={},
            outputs={},
            routes={},
            stages=stages,
            schedule=shape.stored,
        )
        return Plan(
            SCHEMA_VERSION,
            structure,
            estimates,
            Provenance(
                autopar=__version__,
                torch=str(torch.__version__),
                solver=found[0].solution.solver,
                status="feasible",
                objective_ns=proof.objective_ns or estimates.step_ns,
                bound_ns=min(proof.bound_ns, proof.objective_ns),
                gap_ppm=proof.gap_ppm,
                meshes_tried=(proof.mesh,),
                imposed=(*found[0].request.describe_imposed(), *imposed_on(asked.options)),
            ),
        )


def _way(sort: Sequence[tuple[Segment, SegmentCost]]) -> Way:
    """What one of several equal segments takes, on average."""
    costs = [cost for _, cost in sort]
    return Way(
        sum(c.forward_ns + c.backward_ns for c in costs) // len(costs),
        max(c.static_bytes for c in costs),
        max(c.saved_bytes for c in costs),
    )


def _pins(graph: Graph, ends: dict[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    """How what a stage sends and is sent is laid out, by key, as far as other stages have settled
    it."""
    for node in graph.nodes:
        other = {SEND: RECEIVE, RECEIVE: SEND}.get(node.op)
        if other is not None and (other, node.target) in ends:
            yield node.key, ends[other, node.target]


def _laid_out(graph: Graph, structure: Structure) -> dict[tuple[str, str], str]:
    """How what a stage sends and is sent is laid out, by op and tensor."""
    ends = (node for node in graph.nodes if node.op in (SEND, RECEIVE))
    return {(node.op, node.target): structure.ops[node.key] for node in ends}


def _signature(graph: Graph) -> object:
    """What stages have in common that are planned alike."""
    return tuple(
        (
            *(node.key, node.role, node.phase, node.inputs, node.outputs),
            # Of an op it names a tensor of the whole step.
            "" if node.role is Role.OP else general(node.target),
        )
        for node in graph.nodes
    )


def _renamed(found: Candidate, graph: Graph) -> Candidate:
    """The plan of another stage, for the parameters of this one, whose `_signature` is the same."""
    own = found.request.graph
    if own is graph:
        return found
    names = {
        a.target: b.target
        for a, b in zip(own.with_role(Role.PARAM), graph.with_role(Role.PARAM), strict=True)
    }
    params = {names[name]: param for name, param in found.structure.params.items()}
    structure = msgspec.structs.replace(
        found.structure, params=params, fingerprint=fingerprint(graph)
    )
    return replace(found, request=replace(found.request, graph=graph), structure=structure)
