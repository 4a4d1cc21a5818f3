"""The stages of a pipeline, as an integer linear program.

Columns are how many segments of each sort each stage has (integer), and how many of them it does in
each way; which sorts are all done once a stage is (binary); what the busiest rank takes; and the
most that a rank takes for what is done once. A sort is begun only once the one before it is done.
Depth costs nothing: equal segments are counted. Where ranks may differ in their meshes, which one
each has is binary, and so is which one the segments have that have to be on one. At first a segment
may be done partly in one way, partly in another, which bounds what is possible. Then, with the
sizes of stages given, each is done in one.
"""

# PuLP has no types of its own: what it hands out is unknown, not wrong.
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
"""Of the objective: what a stage takes is not known that well."""

_MANY_KINDS, _SLACK = 20, 1.2
"""From how many sorts on, segments are first kept to where no rank need take longer by such a
factor than if all took the same: that leaves each few stages to be in. The relaxation shares
segments among all stages, and takes long where none are equal."""

_Time = Literal["time_ns", "once_ns", "forward_ns"]

_Sizes = Sequence[Sequence[int]]
"""How many segments of each sort each stage has."""


def divide(problem: CutProblem, sizes: _Sizes | None = None) -> Division:
    """The stages with the least step, or those with `sizes`. InfeasibleError if none fit in
    memory."""
    if sizes is not None:
        return _Program(problem, sizes).solve()
    first = _divide_parts(problem)
    sizes = [[round(sum(counts)) for counts in stage] for stage in first.taken]
    try:
        whole = _Program(problem, sizes).solve()
    except InfeasibleError:
        # In whole segments stages of these sizes may just not fit.
        whole = _Program(problem, None, whole=True).solve()
    if problem.is_split:
        first = _divide_parts(problem, is_least=True)
    return replace(whole, bound_ns=first.bound_ns)


def _divide_parts(problem: CutProblem, *, is_least: bool = False) -> Division:
    """The best division of segments that may each be done in several ways, partly in each."""
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
    """What the busiest rank takes at most for a microbatch in divisions as good as one that is
    `known`."""
    if is_least:
        return known.least_ns(problem) / problem.microbatches
    often = problem.microbatches - 1 / problem.chunks
    least_ns = sum(_least_ns(problem)) / problem.chunks
    return (known.step_ns(problem) - least_ns) / often if often else inf


def _least_ns(problem: CutProblem) -> list[int]:
    """What all segments of each sort take at the least for a microbatch."""
    pairs = zip(problem.counts, problem.plans, strict=True)
    return [count * min(plan.time_ns for plan in plans) for count, plans in pairs]


class _Program:
    """The program of `problem`; with `sizes`, or where that is asked for, segments are `whole`:
    done in one way each. What is made least of is `Division.step_ns`, or, where it `is_least`, what
    that takes at the least whose backward comes in two parts. No segment
    is where some rank would have to take more than `microbatch_ns` for a microbatch."""

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
        """How many segments of a sort a stage may have: none, if the ranks up to it have no time
        for all that come before one, or those from it on for all that come after."""
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
        """The best choice there is, with its bound."""
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
        """What a microbatch takes in a stage, or its forward, or what is done once."""
        return pulp.lpSum(
            column * (getattr(plan, what) / self.unit_ns)
            for columns, plans in zip(self.taken[stage], self.problem.plans, strict=True)
            for column, plan in zip(columns, plans, strict=True)
        )

    def _in_order(self) -> None:
        """Every segment is in a stage, every stage has one, and sorts come one after the other."""
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
        """No rank is busier than the busiest, or holds more than there is room for."""
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
        """A rank has one mesh, on which all of its segments are done, as are all that are alike."""
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
        """What stages do of a sort they do on the mesh that is had."""
        for mesh, column in enumerate(has):
            taken = [
                done
                for s in stages
                for done, plan in zip(self.taken[s][kind], self.problem.plans[kind], strict=True)
                if plan.mesh == mesh
            ]
            self.program.addConstraint(pulp.lpSum(taken) <= self.problem.counts[kind] * column)
