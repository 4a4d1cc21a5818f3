"""What the segments of a model take in a pipeline, and how long its stages take then.

Equal segments that follow one another are a sort. A few of each sort are planned as if they were a
stage, on the meshes of a part of the cluster: without a limit of memory, and within some where that
is needed. From what they take the cuts follow (`solver.cutting`), in a fraction of the time in
which a model is planned, however deep it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import msgspec

from autopar.cluster.parts import line_of, part_of
from autopar.compile import Say, best_as_stated
from autopar.cost_model.account import account
from autopar.cost_model.price import price
from autopar.cost_model.sends import delays, gradient_bytes, shared_at_end
from autopar.driver.climbing import climb
from autopar.driver.infeasible_subset import BOUNDLESS_BYTES, suited
from autopar.driver.search import meshes_of, promising
from autopar.driver.segment_sorts import SampledStep
from autopar.errors import InfeasibleError, StageError, UnsuitedMeshError
from autopar.ir.cutting import CutProblem, Division, Way
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import in_microbatches, in_other_microbatches
from autopar.ir.pipeline import ActionTable, Pass, Waiting
from autopar.ir.problem import Problem
from autopar.ir.stages import cut_at, is_end
from autopar.plans.estimates import Delay, Estimates, Shared, TurnTimes
from autopar.plans.fitting import Beaten, Candidate
from autopar.plans.layout import parse_layout
from autopar.plans.pipelines import play_pipeline
from autopar.plans.request import Asked, Narrowed, PlanRequest
from autopar.solver.cutting import divide

_PARTS = (0.85, 0.5)
"""Within which parts of a device's memory segments are planned where memory binds, if it were
shared by segments alone."""

_TOLERANCE = 0.02
"""Of what segments take: each stage is planned again, within its own limit of memory."""


@dataclass(frozen=True, slots=True)
class Divided:
    """Stages on `mesh`, as they are thought to be best: the first op of each but the first, and the
    module it is of. Choices of ops are `narrowed` to those that plans of their segments have. The
    busiest rank `waits` for such a part of the step. They are thought to fit in memory where it
    `is_within`, to save some for that where it `is_tight`. Nothing is proven where `bound_ns` is
    0."""

    mesh: Mesh
    starts: tuple[tuple[str, int], ...]
    step_ns: int
    waits: float
    objective_ns: int
    bound_ns: int
    narrowed: Narrowed
    is_within: bool
    is_tight: bool

    def is_better(self, other: Divided) -> bool:
        """Whether these stages are thought to fit where others do not, or to take less time."""
        if self.is_within != other.is_within:
            return self.is_within
        return self.step_ns < other.step_ns

    @property
    def gap_ppm(self) -> int:
        """By which part of the step other stages may be better, in millionths."""
        if not self.objective_ns:
            return 1_000_000
        return max(0, round((1 - self.bound_ns / self.objective_ns) * 1e6))


_Free = dict[tuple[str, int, bool, int], Candidate]
"""Plans of segments without a limit of memory: on which mesh, in how many microbatches, whether
backward comes in two parts, and of which stage."""


class SegmentWays:
    """The segments of what is asked for, in any number of microbatches."""

    def __init__(self, asked: Asked, say: Say) -> None:
        self.asked, self.say = asked, say
        self._sampled: dict[bool, SampledStep] = {}
        self._free: _Free = {}

    def graph(self, microbatches: int) -> Graph:
        """The whole step, in so many microbatches."""
        return self._in(self._sample(microbatches).graph, microbatches)

    def _sample(self, microbatches: int) -> SampledStep:
        # In more than one they are alike but for their extents.
        is_whole = microbatches == 1
        if is_whole not in self._sampled:
            graph = in_microbatches(self.asked.graph, microbatches)
            self._sampled[is_whole] = SampledStep(graph)
        return self._sampled[is_whole]

    def _in(self, graph: Graph, microbatches: int) -> Graph:
        if graph.turns == microbatches:
            return graph
        return in_other_microbatches(graph, self.asked.graph, microbatches)

    def divided(
        self, table: ActionTable, known_ns: int | None = None, mesh: str = ""
    ) -> Divided | None:
        """The best stages for `table` on any mesh of their part of the cluster, or a given `mesh`;
        None if all are thought to take `known_ns` or more. InfeasibleError if none fit in memory,
        StageError if the model cannot be cut so."""
        sample, ranks = self._sample(table.microbatches), len(table.rows)
        if not self.asked.options.cuts and len(sample.parts) < table.num_stages:
            raise StageError(
                f"{table.num_stages} stages are more than the model has parts: {len(sample.parts)}"
            )
        graphs = [self._in(graph, table.microbatches) for graph in sample.stages]
        options = replace(self.asked.options, microbatches=table.microbatches, loss_chunks=1)
        options = replace(options, mesh=mesh or options.mesh)
        cluster = part_of(self.asked.cluster, self.asked.cluster.num_devices // ranks)
        asked = replace(
            self.asked, graph=graphs[sample.busiest], cluster=cluster, options=options
        ).while_waiting(_most(table), is_split=table.is_split)
        found = _Best(known_ns, self.say)
        requests = suited(asked, meshes_of(cluster, options))
        start = requests[promising(requests)[0]].mesh
        line = sorted((request.mesh for request in requests), key=_place)

        def improves(place: int) -> bool:
            each = [_on(replace(asked, graph=graph), line[place]) for graph in graphs]
            return found.offer(_OnMesh(self.asked, sample, table, each, self._free, self.say))

        climb(len(line), line.index(start), improves)
        return found.best()


class _Best:
    """The best stages so far, on any mesh. They are to take less than `known_ns`."""

    def __init__(self, known_ns: int | None, say: Say) -> None:
        self.known_ns, self.say = known_ns, say
        self._best: Divided | None = None
        self._failure: InfeasibleError | None = None

    def offer(self, there: _OnMesh) -> bool:
        """Whether the best stages on a mesh are better than those before, if there were any."""
        best = self._best if self._best is not None and self._best.is_within else None
        known = [n for n in (self.known_ns, best.step_ns if best else None) if n]
        try:
            found = there.divided(min(known, default=None))
        except InfeasibleError as error:
            self._failure = self._failure or error
            return self._best is None
        except Beaten as beaten:
            self.say(f"{beaten}")
            return False
        is_better = self._best is None or found.is_better(self._best)
        self._best = found if is_better else self._best
        return is_better

    def best(self) -> Divided | None:
        """None if none takes less than `known_ns`; InfeasibleError if none fit in memory."""
        if self._best is None and self._failure is not None and self.known_ns is None:
            raise self._failure
        return self._best


class _OnMesh:
    """The segments on one mesh, and the plans found of the stages that stand for them, each list in
    the order of the memory that they are within."""

    def __init__(
        self,
        asked: Asked,
        sample: SampledStep,
        table: ActionTable,
        requests: Sequence[PlanRequest],
        free: _Free,
        say: Say,
    ) -> None:
        self.asked, self.sample, self.table, self.say = asked, sample, table, say
        self.requests = [replace(r.opened(), tolerance=_TOLERANCE) for r in requests]
        self.free = free
        self.stated: dict[int, Problem] = {}
        self.plans: list[list[Candidate]] = [[] for _ in requests]
        self.limit = asked.options.memory_limit_bytes or asked.cluster.device.memory_bytes
        ranks = len(table.rows)
        self.line = line_of(asked.cluster, ranks) if ranks > 1 else None
        self.each = [max(1.0, sample.often(k) / ranks) for k in range(len(requests))]
        """How often a rank takes what each of the stages takes."""

    def divided(self, known_ns: int | None) -> Divided:
        """The best stages. Beaten if all are thought to take `known_ns` or more; InfeasibleError if
        nothing can be computed there."""
        busiest, mesh = self.sample.busiest, self.requests[0].mesh
        often = self.sample.least_often(busiest, self.table)
        cutoff = None if known_ns is None else int(known_ns / often)
        self.say(f"{mesh}: what segments take")
        for stage in (busiest, *(k for k in range(len(self.plans)) if k != busiest)):
            self.plans[stage].append(self._without_limit(stage, cutoff))
        for part in (None, *_PARTS):
            if part is not None:
                self._plan_within(part)
            try:
                return self._found(self._divide(self._problem()))
            except InfeasibleError as error:
                self.say(f"{mesh}: {error}")
        # Stages may fit that are planned for themselves: more is made again, of more ops.
        boundless = replace(self._problem(), limit_bytes=BOUNDLESS_BYTES)
        return self._found(self._divide(boundless), is_within=False)

    def _without_limit(self, stage: int, cutoff: int | None) -> Candidate:
        """The plan of a stage, whatever it holds. Other orders have the same, and hold another
        number of microbatches meanwhile."""
        request, table = self.requests[stage], self.table
        key = request.mesh.text, table.microbatches, table.is_split, stage
        least = cutoff if stage == self.sample.busiest else None
        if key not in self.free:
            self.free[key] = best_as_stated(request, self._stated(stage, None), self.say, least)
        found = self.free[key]
        if least is not None and found.solution.bound >= least:
            raise Beaten(request.mesh, found.solution.bound)
        now = replace(found.request, in_flight=request.in_flight, others=request.others)
        if now == found.request:
            return found
        return replace(found, request=now, estimates=account(now, found.structure).estimates)

    def _plan_within(self, part: float) -> None:
        """Plans within such a part of a device's memory, where those that there are are not. None
        is too slow: stages have some segments in each way."""
        for stage, plans in enumerate(self.plans):
            limit, last = int(self.limit * part / self.each[stage]), plans[-1]
            if last.estimates.memory.total <= limit:
                continue
            request = self.requests[stage].within(limit)
            stated = self._stated(stage, limit)
            try:
                found = best_as_stated(request, stated, self.say, None, last.solution.basis)
                plans.append(found)
            except InfeasibleError as error:
                self.say(f"{error}")

    def _stated(self, stage: int, limit: int | None) -> Problem:
        if stage not in self.stated:
            self.stated[stage] = price(self.requests[stage])
        return replace(self.stated[stage], usage_limit=limit)

    def _problem(self) -> CutProblem:
        stages = range(self.table.num_stages)
        return CutProblem(
            tuple(sort.count for sort in self.sample.sorts),
            tuple(
                tuple(_way(plan, sort.share) for plan in self.plans[sort.stage])
                for sort in self.sample.sorts
            ),
            tuple(self.table.ranks[stage] for stage in stages),
            tuple(self.table.in_flight(stage) for stage in stages),
            self.table.microbatches,
            self.limit,
            self.table.is_split,
        )

    def _divide(self, problem: CutProblem) -> Division:
        cuts = self.asked.options.cuts
        if not cuts:
            return divide(problem)
        graph, starts = self.sample.graph, [part.start for part in self.sample.parts]
        ops = (cut_at(graph, module) for module in cuts)
        numbers = [sum(start <= op for start in starts[1:]) for op in ops]
        return divide(problem, problem.sizes(numbers))

    def _found(self, division: Division, *, is_within: bool = True) -> Divided:
        parts, cuts = self.sample.parts, self.asked.options.cuts
        starts = [(parts[k].module, parts[k].start) for k in division.starts if not cuts]
        stages = [self._estimates(taken) for taken in division.taken]
        shared = self._shared(division)
        step_ns = play_pipeline(self.table, stages, self._sends(), shared).step_ns
        busy_ns = [0] * len(self.table.rows)
        for stage, found in enumerate(stages):
            busy_ns[self.table.ranks[stage]] += _work_ns(found.turn, self.table.microbatches)
        is_proven = not cuts  # Of cuts that are given others are no bound.
        return Divided(
            self.requests[0].mesh,
            tuple(starts) or tuple((m, cut_at(self.sample.graph, m)) for m in cuts),
            step_ns,
            1 - max(busy_ns) / max(1, step_ns),
            round(division.least_ns(self._problem())) if is_proven else 0,
            division.bound_ns if is_proven else 0,
            tuple(self._narrowed()),
            is_within,
            any(len(plans) > 1 for plans in self.plans),
        )

    def _estimates(self, taken: Sequence[Sequence[float]]) -> Estimates:
        """What a stage takes that has so many segments of each sort in each way."""
        turns = dict.fromkeys(TurnTimes.__struct_fields__, 0.0)
        for sort, numbers in zip(self.sample.sorts, taken, strict=True):
            for plan, number in zip(self.plans[sort.stage], numbers, strict=True):
                for name in turns:
                    turns[name] += number * sort.share * getattr(plan.estimates.turn, name)
        turn = TurnTimes(**{name: round(ns) for name, ns in turns.items()})
        return msgspec.structs.replace(self.plans[0][0].estimates, turn=turn)

    def _sends(self) -> list[Delay]:
        """What a microbatch takes from each stage to the next, and its gradient back."""
        plan, last = self.plans[self.sample.busiest][0], self.table.num_stages - 1
        layout = parse_layout(plan.request.graph, plan.structure)
        sent = [each for each in delays([layout], self.line) if each.phase == Phase.FORWARD.value]
        size, ns = sum(each.num_bytes for each in sent), sum(each.time_ns for each in sent)
        forth = [(s, s + 1, Phase.FORWARD) for s in range(last)]
        back = [(s + 1, s, Phase.BACKWARD) for s in range(last)]
        return [Delay(s, t, phase.value, size, ns) for s, t, phase in forth + back]

    def _shared(self, division: Division) -> Sequence[Shared]:
        """What ranks share at the end of a step that is divided so."""
        stages = {
            name: {bisect_right(division.starts, segment) for segment in segments}
            for name, segments in self.sample.tied.items()
        }
        tied: dict[str, tuple[set[int], int]] = {}
        for plan, *_ in self.plans:
            own = [n for n in stages if len(stages[n]) > 1 and n in plan.structure.params]
            if own:
                layout = parse_layout(plan.request.graph, plan.structure)
                tied |= {n: (stages[n], gradient_bytes(layout, n)) for n in own}
        return shared_at_end(self.asked.graph, tied, self.table.ranks, self.asked.cluster)

    def _narrowed(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        labels: dict[str, dict[str, None]] = {}
        for plan in (plan for plans in self.plans for plan in plans):
            # What is made again has to be settled for each stage.
            own = {n.key for n in plan.request.graph.with_role(Role.OP) if not is_end(n)}
            for key, label in plan.structure.ops.items():
                if key in own:
                    labels.setdefault(key, {})[label] = None
        yield from ((key, tuple(sorted(found))) for key, found in sorted(labels.items()))


def _place(mesh: Mesh) -> tuple[int, ...]:
    """Where a mesh is in a line of those of equal size: by the size of its last axis, so that
    neighbours differ in little."""
    last = mesh.sizes[-1] if len(mesh.sizes) > 1 else 1
    return len(mesh.sizes) > 2, last, *mesh.sizes


def _on(asked: Asked, mesh: Mesh) -> PlanRequest:
    """What is asked of segments, whatever the strategy if that has nothing to say of them."""
    try:
        return asked.on(mesh)
    except UnsuitedMeshError:
        return replace(asked, options=replace(asked.options, strategy="")).on(mesh)


def _most(table: ActionTable) -> tuple[Waiting, ...]:
    """How many other microbatches wait in any stage of a table, at most."""
    found = [each for stage in range(table.num_stages) for each in table.others(stage)]
    return (Waiting(max(w.backward for w in found), max(w.weights for w in found)),)


def _work_ns(turn: TurnTimes, microbatches: int) -> int:
    """What a rank does for a stage in a step."""
    usual, last = (
        sum(turn.length_ns(kind, is_last=is_last) for kind in Pass) for is_last in (False, True)
    )
    return (microbatches - 1) * usual + last + turn.update_ns


def _way(plan: Candidate, share: float) -> Way:
    """What a segment takes that has such a share of what is planned."""
    estimates, turn = plan.estimates, plan.estimates.turn
    memory, time_ns = estimates.memory, turn.forward_ns + turn.backward_ns + turn.weights_ns
    last_ns = turn.last_forward_ns + turn.last_backward_ns + turn.last_weights_ns
    static = memory.params + memory.gradients + memory.optimizer + memory.accumulated
    return Way(
        ceil(share * time_ns),
        ceil(share * static),
        ceil(share * (memory.kept + memory.saved) / plan.request.in_flight),
        ceil(share * (max(0, last_ns - time_ns) + turn.update_ns)),
        ceil(share * turn.forward_ns),
    )
