"""The state of a search: the best plan, the bound, the time left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf, isfinite

from autopar.ir.problem import Basis, FloatArray, Problem
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluation, Evaluator
from autopar.solver.ilp import Model
from autopar.solver.windows import Shares

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """A progress callback that ignores its text."""


SAME_COST = 0.01
"""Costs are integers: a bound less than one below a cost, by this margin, proves it lowest."""


def least_whole(bound: float) -> int:
    """The smallest integer cost that a lower bound leaves possible."""
    return ceil(bound - SAME_COST) if isfinite(bound) else 0


@dataclass(slots=True)
class Search:
    """The state of a search. `bound` is below every plan's cost; `choice` is empty until there is a
    feasible plan. `relaxation` is the last relaxed model with its row duals, in units of the cost.
    `shares` are the weights of the windows' savings by these duals, and `basis` is the final basis.
    `unlimited_bound` is below the cost of every plan, whatever memory it takes, and one more byte
    of memory would save `byte_ns`. The search `is_rough` if it ended early with the first plan.
    Plans that cost `cutoff` or more do not count, and a gap of `tolerance` times the cost is
    allowed."""

    problem: Problem
    evaluator: Evaluator
    clock: Clock
    progress: Progress
    bound: float = -inf
    choice: tuple[int, ...] = ()
    evaluation: Evaluation | None = None
    infeasible: bool = False
    relaxation: tuple[Model, FloatArray] | None = None
    shares: Shares | None = None
    basis: Basis | None = None
    byte_ns: float | None = None
    is_rough: bool = False
    unlimited_bound: float = -inf
    cutoff: float = inf
    tolerance: float = 0.0
    statistics: dict[str, int | float | str] = field(default_factory=dict[str, int | float | str])

    @property
    def cost(self) -> float:
        """The cost of the best plan; infinite without one."""
        return self.evaluation.objective if self.evaluation else inf

    @property
    def gap(self) -> float:
        """Cost of the best plan less the bound; infinite without a plan."""
        return self.cost - self.bound

    @property
    def proven(self) -> bool:
        """Whether no plan can be cheaper than the best one known."""
        return self.gap < 1 - SAME_COST

    @property
    def beaten(self) -> bool:
        """Whether no plan can cost less than the cutoff."""
        return self.bound - SAME_COST > self.cutoff - 1

    @property
    def is_finished(self) -> bool:
        """Whether the search is over."""
        is_close = self.evaluation is not None and self.gap <= self.tolerance * self.cost
        return self.proven or self.beaten or is_close

    @property
    def is_limiting(self) -> bool:
        """Whether there may be a better plan, or one below the cutoff, with more memory."""
        if self.beaten:
            return self.unlimited_bound - SAME_COST <= self.cutoff - 1
        gap = self.cost - self.unlimited_bound
        is_tolerated = self.evaluation is not None and gap <= self.tolerance * self.cost
        return gap >= 1 - SAME_COST and not is_tolerated

    def submit(self, choice: tuple[int, ...], evaluation: Evaluation) -> None:
        """Keeps a feasible plan when it is the cheapest so far."""
        if evaluation.feasible and evaluation.objective < self.cost:
            self.choice, self.evaluation = choice, evaluation
            gap = f", gap {1 - self.bound / self.cost:.2%}" if self.bound > 0 else ""
            self.progress(f"plan of cost {evaluation.objective}, bound {self.bound:.0f}{gap}")

    def prefer(self, choice: tuple[int, ...], evaluation: Evaluation) -> None:
        """Keeps a feasible plan also if it costs as much as the best one: ties are broken."""
        if evaluation.feasible and evaluation.objective == self.cost:
            self.choice, self.evaluation = choice, evaluation
        self.submit(choice, evaluation)

    def raise_bound(self, bound: float) -> None:
        """Takes a better lower bound."""
        self.bound = max(self.bound, bound)
