"""The oracle: every choice of every node and every set of arcs, tried one by one.

It shares nothing with `autopar.solver`; it is for problems of a handful of nodes and arcs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product

from autopar.ir.problem import FORBIDDEN, Flow, Problem


@dataclass(frozen=True)
class Best:
    """The lowest cost, every choice that has it, and the smallest peak of any allowed choice (with
    or without the limit)."""

    objective: int | None
    choices: tuple[tuple[int, ...], ...]
    least_peak: int | None

    def lowest_tie_weight(self, problem: Problem) -> int:
        return min(tie_weight(problem, choice) for choice in self.choices)


def tie_weight(problem: Problem, choice: Sequence[int]) -> int:
    total = 0
    for key, labels, c in zip(problem.keys, problem.labels, choice, strict=True):
        digest = blake2b(key.encode() + b"\0" + str(labels[c]).encode(), digest_size=8).digest()
        total += int.from_bytes(digest, "big") % 2**20
    return total


def solve_by_enumeration(problem: Problem) -> Best:
    best: int | None = None
    choices: list[tuple[int, ...]] = []
    least_peak: int | None = None
    tables = flow_tables(problem)
    for choice in product(*(range(len(costs)) for costs in problem.costs)):
        cost = cost_of(problem, choice, tables)
        if cost is None:
            continue
        peak = _peak(problem, choice)
        least_peak = peak if least_peak is None else min(peak, least_peak)
        if problem.usage_limit is not None and peak > problem.usage_limit:
            continue
        if best is None or cost < best:
            best, choices = cost, []
        if cost == best:
            choices.append(choice)
    return Best(best, tuple(choices), least_peak)


Table = list[tuple[int, list[int], list[set[int]]]]


def flow_tables(problem: Problem) -> list[Table]:
    return [_flow_table(flow) for flow in problem.flows]


def cost_of(problem: Problem, choice: Sequence[int], tables: Sequence[Table]) -> int | None:
    """None if something is not allowed."""
    parts = [int(costs[c]) for costs, c in zip(problem.costs, choice, strict=True)]
    parts += [int(e.cost[choice[e.source], choice[e.target]]) for e in problem.edges]
    if any(part >= FORBIDDEN for part in parts):
        return None
    ways: list[list[list[int]]] = []
    for flow, table in zip(problem.flows, tables, strict=True):
        asked = {int(s.state[choice[s.node]]) for s in flow.sinks} - {-1}
        made = int(flow.source_state[choice[flow.source]])
        covering = [
            (cost, arcs)
            for cost, arcs, reached in table
            if asked <= (reached[made] if made >= 0 else set())
        ]
        if not covering:
            return None
        least = min(cost for cost, _ in covering)
        parts.append(least)
        ways.append([arcs for cost, arcs in covering if cost == least])
    if not problem.windows:
        return sum(parts)
    return sum(parts) - max(_hidden(problem, choice, used) for used in product(*ways))


def _hidden(problem: Problem, choice: Sequence[int], ways: Sequence[list[int]]) -> int:
    return sum(
        min(
            sum(int(saved[choice[i]]) for i, saved in saving.nodes.items())
            + sum(int(saved[a]) for f, saved in saving.flows.items() for a in ways[f])
            for saving in window.savings
        )
        for window in problem.windows
    )


def _flow_table(flow: Flow) -> Table:
    """(cost, arcs, states reached from each state) of every set of allowed arcs."""
    allowed = [a for a in range(len(flow.costs)) if flow.costs[a] < FORBIDDEN]
    table = []
    for used in product([False, True], repeat=len(allowed)):
        arcs = [a for a, is_used in zip(allowed, used, strict=True) if is_used]
        reached = []
        for start in range(len(flow.states)):
            seen = {start}
            for _ in arcs:
                seen |= {int(flow.heads[a]) for a in arcs if int(flow.tails[a]) in seen}
            reached.append(seen)
        table.append((sum(int(flow.costs[a]) for a in arcs), arcs, reached))
    return table


def _peak(problem: Problem, choice: Sequence[int]) -> int:
    times = {t for usages in problem.usages for u in usages for t in (u.start, u.stop)}
    return max(
        (
            sum(
                int(usage.amounts[c])
                for usages, c in zip(problem.usages, choice, strict=True)
                for usage in usages
                if usage.start <= time < usage.stop
            )
            for time in times
        ),
        default=0,
    )
