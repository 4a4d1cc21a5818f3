"""The stages of a pipeline, as an integer linear program.

Its columns are:

* the number of segments of each kind in each stage (integer), and how many of these have each
  segment plan;
* whether all segments of a kind are in the stages up to each one (binary);
* the time of the busiest rank for a microbatch, and the longest time of a rank once per step;
* where ranks may differ in their meshes: which mesh each rank has, and which one all segments have
  that must be on the same (binary).

A kind begins only when the one before it is complete. Depth costs nothing: equal segments are
counted. At first a segment may have parts of several plans, which gives a bound. Then, with the
sizes of stages fixed, each segment has one plan.
"""

# PuLP has no types of its own: its results are unknown, not wrong.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none
# pyright: reportUnknownVariableType=none, reportUnknownArgumentType=none

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf
from typing import Any, Literal

import pulp

from autopar.errors import InfeasibleError, SolverError
from autopar.ir.cutting import CutProblem, Division, RankMeshes
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.modelling import as_arrays

_GAP = 1e-3
"""The gap, as a part of the objective: times of stages are not known more exactly."""

_MANY_KINDS, _SLACK = 20, 1.2
"""With at least `_MANY_KINDS` segment kinds, a segment may first be only in stages where no rank
takes more than `_SLACK` times the mean of all ranks. That leaves few stages for each segment. The
relaxation shares segments among all stages, and takes long if no segments are equal."""

_Time = Literal["time_ns", "once_ns", "forward_ns"]

_Sizes = Sequence[Sequence[int]]
"""The number of segments of each kind, for each stage."""


def divide(problem: CutProblem, sizes: _Sizes | None = None) -> Division:
    """The stages with the shortest step, or the best ones with `sizes`. InfeasibleError if none fit
    in memory."""
    if sizes is not None:
        return _Program(problem, sizes).solve()
    first = _divide_parts(problem)
    sizes = [[round(sum(counts)) for counts in stage] for stage in first.taken]
    try:
        whole = _Program(problem, sizes).solve()
    except InfeasibleError:
        # With one plan per segment, stages of these sizes may not fit.
        whole = _Program(problem, None, whole=True).solve()
    if problem.is_split:
        first = _divide_parts(problem, is_least=True)
    return replace(whole, bound_ns=first.bound_ns)


def _divide_parts(problem: CutProblem, *, is_least: bool = False) -> Division:
    """The best division where a segment may have parts of several plans."""
    all_ns = sum(_least_ns(problem))
    microbatch_ns = _SLACK * all_ns / len({*problem.ranks})
    while len(problem.counts) >= _MANY_KINDS and microbatch_ns < all_ns:
        try:
            division = _Program(
                problem, None, is_least=is_least, microbatch_ns=microbatch_ns
            ).solve()
        except InfeasibleError:
            microbatch_ns *= 2
            continue
        longest_ns = _longest_microbatch(problem, division, is_least=is_least)
        if longest_ns <= microbatch_ns:
            return division
        return _Program(problem, None, is_least=is_least, microbatch_ns=longest_ns).solve()
    return _Program(problem, None, is_least=is_least).solve()


def _longest_microbatch(problem: CutProblem, known: Division, *, is_least: bool) -> float:
    """The longest time of the busiest rank for a microbatch, in divisions as good as the `known`
    one."""
    if is_least:
        return known.least_ns(problem) / problem.microbatches
    often = problem.microbatches - 1 / problem.chunks
    least_ns = sum(_least_ns(problem)) / problem.chunks
    return (known.step_ns(problem) - least_ns) / often if often else inf


def _least_ns(problem: CutProblem) -> list[int]:
    """The least time of all segments of each kind for a microbatch."""
    pairs = zip(problem.counts, problem.plans, strict=True)
    return [count * min(plan.time_ns for plan in plans) for count, plans in pairs]


class _Program:
    """The program of `problem`. If `whole`, or with `sizes`, each segment has one plan. The
    objective is `Division.step_ns` or, if `is_least`, the least step with backward in two parts. No
    segment is in a stage where a rank would take more than `microbatch_ns` for a microbatch."""

    def __init__(
        self,
        problem: CutProblem,
        sizes: _Sizes | None,
        *,
        whole: bool = False,
        is_least: bool = False,
        microbatch_ns: float = inf,
    ) -> None:
        self.problem, self.sizes, self.is_least = problem, sizes, is_least
        self.microbatch_ns = microbatch_ns * (1 + _GAP)
        self.is_whole = whole or sizes is not None
        self.stages, self.kinds = range(len(problem.ranks)), range(len(problem.counts))
        self.unit_ns = max(1.0, *(plan.time_ns for plans in problem.plans for plan in plans))
        """Times are in units of the longest segment's, so that HiGHS sees numbers around 1."""
        self.program = pulp.LpProblem("stages", pulp.LpMinimize)
        self.most = [[self._most(s, k) for k in self.kinds] for s in self.stages]
        self.taken = [[self._plans(s, k) for k in self.kinds] for s in self.stages]
        self.busiest = self.program.add_variable("t", 0)
        self.once = self.program.add_variable("o", 0)

    def _most(self, stage: int, kind: int) -> int:
        """The most segments of a kind in a stage. It is 0 if the ranks up to the stage have no time
        for all segments before one, or the ranks from it on for all after one."""
        least, ranks = _least_ns(self.problem), self.problem.ranks
        count = self.problem.counts[kind]
        one = least[kind] / count
        before = (sum(least[:kind]) + one) / len({*ranks[: stage + 1]})
        after = (sum(least[kind + 1 :]) + one) / len({*ranks[stage:]})
        return count if max(before, after) <= self.microbatch_ns else 0

    def _plans(self, stage: int, kind: int) -> list[Any]:
        category = pulp.LpInteger if self.is_whole else pulp.LpContinuous
        most = self.most[stage][kind]
        return [
            self.program.add_variable(f"a{stage:04d}_{kind:04d}_{plan:04d}", 0, most, category)
            for plan in range(len(self.problem.plans[kind]))
        ]

    def solve(self) -> Division:
        """The best division, with its bound."""
        self._minimise()
        if self.sizes is None:
            self._in_order()
        else:
            self._of_sizes(self.sizes)
        self._within_limits()
        if self.problem.meshes is not None:
            self._on_meshes(self.problem.meshes)
        solver = Highs({"mip_rel_gap": _GAP})
        solver.relax(as_arrays(self.program))
        answer = solver.solve_integer()
        if answer.outcome is Outcome.INFEASIBLE:
            raise InfeasibleError("no stages fit in memory")
        if answer.outcome is not Outcome.OPTIMAL:
            raise SolverError(f"no stages were found: {answer.detail}")
        for column, value in zip(self.program.variables(), answer.values.tolist(), strict=True):
            column.varValue = value
        taken = tuple(
            tuple(tuple(variable.varValue or 0.0 for variable in variables) for variables in stage)
            for stage in self.taken
        )
        if self.is_whole:
            taken = tuple(tuple(tuple(map(round, counts)) for counts in stage) for stage in taken)
        return Division(taken, floor(answer.bound * self.unit_ns * (1 + 1e-9)))

    def _minimise(self) -> None:
        if self.is_least:
            self.program.setObjective(pulp.lpSum([self.busiest]))
            return
        problem, chunks = self.problem, self.problem.chunks
        total = pulp.lpSum(self._time(s, "time_ns") for s in self.stages)
        often = problem.microbatches - 1 / chunks
        self.program.setObjective(often * self.busiest + total / chunks + self.once)

    def _time(self, stage: int, what: _Time) -> pulp.LpAffineExpression:
        """The time of a stage: for a microbatch, for its forward, or once per step."""
        return pulp.lpSum(
            column * (getattr(plan, what) / self.unit_ns)
            for columns, plans in zip(self.taken[stage], self.problem.plans, strict=True)
            for column, plan in zip(columns, plans, strict=True)
        )

    def _in_order(self) -> None:
        """Every segment is in a stage, every stage has one, and kinds follow one another."""
        program, counts = self.program, self.problem.counts
        so_far: list[Any] = [pulp.lpSum([]) for _ in self.kinds]
        for s in self.stages:
            sizes = [
                program.add_variable(f"n{s:04d}_{k:04d}", 0, self.most[s][k], pulp.LpInteger)
                for k in self.kinds
            ]
            done = [
                program.add_variable(f"f{s:04d}_{k:04d}", 0, 1, pulp.LpInteger) for k in self.kinds
            ]
            program.addConstraint(pulp.lpSum(sizes) >= 1)
            for k in self.kinds:
                program.addConstraint(pulp.lpSum(self.taken[s][k]) == sizes[k])
                so_far[k] = so_far[k] + sizes[k]
                program.addConstraint(so_far[k] >= counts[k] * done[k])
                if k:
                    program.addConstraint(so_far[k] <= counts[k] * done[k - 1])
        for k in self.kinds:
            program.addConstraint(so_far[k] == counts[k])

    def _of_sizes(self, sizes: _Sizes) -> None:
        for stage, numbers in zip(self.taken, sizes, strict=True):
            for columns, number in zip(stage, numbers, strict=True):
                self.program.addConstraint(pulp.lpSum(columns) == number)

    def _within_limits(self) -> None:
        """No rank takes longer than the busiest, or more memory than the limit."""
        problem, limit = self.problem, float(self.problem.limit_bytes)
        for rank in sorted(set(problem.ranks)):
            own = [s for s in self.stages if problem.ranks[s] == rank]
            microbatch, once = (
                pulp.lpSum(self._time(s, what) for s in own) for what in ("time_ns", "once_ns")
            )
            if self.is_least:
                before = pulp.lpSum(self._time(s, "forward_ns") for s in range(own[0]))
                whole = before + problem.microbatches * microbatch + once
                self.program.addConstraint(self.busiest >= whole)
            else:
                self.program.addConstraint(self.busiest >= microbatch)
                self.program.addConstraint(self.once >= once)
            held = [
                column * ((plan.static_bytes + problem.in_flight[s] * plan.saved_bytes) / limit)
                for s in own
                for columns, plans in zip(self.taken[s], problem.plans, strict=True)
                for column, plan in zip(columns, plans, strict=True)
            ]
            self.program.addConstraint(pulp.lpSum(held) <= 1)

    def _on_meshes(self, meshes: RankMeshes) -> None:
        """Each rank has one mesh for all of its segments, and so have segments that are alike."""
        problem, program = self.problem, self.program
        ranks = sorted(set(problem.ranks))
        has = [self._one_of(f"m{rank:04d}", len(meshes.sizes)) for rank in ranks]
        if meshes.given:
            for rank, mesh in enumerate(meshes.given):
                program.addConstraint(has[rank][mesh] >= 1)
        else:
            sized = [column * n for own in has for column, n in zip(own, meshes.sizes, strict=True)]
            program.addConstraint(pulp.lpSum(sized) == meshes.devices)
        for s in self.stages:
            for k in self.kinds:
                self._done_on([s], k, has[ranks.index(problem.ranks[s])])
        for number, kinds in enumerate(meshes.alike):
            one = self._one_of(f"l{number:04d}", len(meshes.sizes))
            for k in kinds:
                self._done_on(self.stages, k, one)

    def _one_of(self, name: str, count: int) -> list[Any]:
        columns = [
            self.program.add_variable(f"{name}_{mesh:04d}", 0, 1, pulp.LpInteger)
            for mesh in range(count)
        ]
        self.program.addConstraint(pulp.lpSum(columns) == 1)
        return columns

    def _done_on(self, stages: Sequence[int], kind: int, has: Sequence[Any]) -> None:
        """Segments of a kind in `stages` are on the mesh whose column in `has` is 1."""
        for mesh, column in enumerate(has):
            taken = [
                done
                for s in stages
                for done, plan in zip(self.taken[s][kind], self.problem.plans[kind], strict=True)
                if plan.mesh == mesh
            ]
            self.program.addConstraint(pulp.lpSum(taken) <= self.problem.counts[kind] * column)
