"""What is known while a problem is being solved: the best plan, the bound, the time left."""

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
    """The progress that is told to nobody."""


SAME_COST = 0.01
"""Costs are integers: a bound less than one below a cost, by this margin, proves it lowest."""


def least_whole(bound: float) -> int:
    """The smallest integer cost that a lower bound leaves possible."""
    return ceil(bound - SAME_COST) if isfinite(bound) else 0


@dataclass(slots=True)
class Search:
    """`bound` is below every plan's cost; `choice` is empty until there is a feasible plan.
    `relaxation` is the model that was relaxed last, with its row duals in units of the cost, and
    `shares` what these say of the windows; it ended at `basis`. `unlimited_bound` is below the
    cost of every plan, whatever memory it takes, and `byte_ns` what a byte more of it would save.
    It `is_rough` where the search ended with the first plan, though more could be found.
    Plans that cost `cutoff` or more are of no interest, nor is a gap of `tolerance` times the
    cost."""

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
        """That of the best plan; infinite without one."""
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
        """Whether nothing is left to look for."""
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
            self.progress(f"plan of cost {evaluation.objective}, bound {self.bound:.0f}")

    def prefer(self, choice: tuple[int, ...], evaluation: Evaluation) -> None:
        """Keeps a feasible plan also when it costs what the best one does: ties are broken."""
        if evaluation.feasible and evaluation.objective == self.cost:
            self.choice, self.evaluation = choice, evaluation
        self.submit(choice, evaluation)

    def raise_bound(self, bound: float) -> None:
        """Takes a better lower bound."""
        self.bound = max(self.bound, bound)
