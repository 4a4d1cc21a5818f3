"""What a plan's decisions are worth: the step with every other sharding of a tensor, and with more
memory or a faster link. All other decisions may adapt.

Every step here is one as modelled (`Estimates.modelled_ns`), as the solver compares plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.problem import Status


@dataclass(frozen=True, slots=True)
class Alternative:
    """A sharding that a tensor may have.

    `modelled_ns` is the step of the best plan known with it, and `bound_ns` a lower bound on all
    plans with it. `status` says what is known: `OPTIMAL` (both are equal), `FEASIBLE` (a gap),
    `INFEASIBLE` (no plan with it fits in memory), `LIMIT` (only the bound: it was not solved for).
    """

    sharding: str
    is_chosen: bool
    modelled_ns: int | None
    bound_ns: int
    status: Status


@dataclass(frozen=True, slots=True)
class Explanation:
    """The alternatives of a tensor, the fastest first, then those with a bound alone, then those
    that do not fit. `subject` says which tensor and what is fixed; `modelled_ns` is the plan's."""

    subject: str
    mesh: Mesh
    modelled_ns: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Benefit:
    """The step before and after a change of the resources of a plan.

    `estimate_ns` needs no solve. For memory it is a bound by duals: no plan is faster; None if the
    relaxation is too large. For a link it is the step of the plan as it is: the best one is not
    slower. `modelled_ns` is that of the best plan for the change, `bound_ns` a proven bound on it.
    """

    change: str
    before_ns: int
    estimate_ns: int | None
    modelled_ns: int
    bound_ns: int
