"""How a plan came about: what looked for it, with what proof, and what else was looked at."""

from __future__ import annotations

from typing import Literal

import msgspec

from autopar.plans.cluster_rates import Count
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.policy import Policy

FRAGILE = 0.005
"""A plan that is better than those of another structure by less than this part of its step is
fragile: what they are is decided by trifles, or by errors of the cost model."""


PROVEN = 0.001
"""A plan whose gap is at most this part of its step is as good as optimal: to close the last of it
takes long where resources share a window, and prices are not that exact."""


class Margin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the best plan of another structure (`weight_layouts`) takes: `bound_ns` what none of
    them beats, `step_ns` the step of the best one known (None if none is), and `rival` what it does
    otherwise. They are steps as modelled (`Estimates.modelled_ns`), not differences."""

    bound_ns: Count
    step_ns: Count | None
    rival: str


OutcomeKind = Literal["planned", "estimated", "not better", "infeasible", "skipped"]
"""What may become of a candidate."""


class CandidateOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a `candidate` of the search. It was `planned`, and takes `ns`; `estimated`, by
    what segments of the model take, at `ns`; `not better`, as no plan of it takes less than `ns`;
    `infeasible`, or `skipped` without a look, for a `reason`. Nanoseconds of one stage are as
    modelled, of several as simulated."""

    candidate: str
    result: OutcomeKind
    ns: Count | None = None
    reason: str = ""


IN_STAGES = "in_stages"
"""What `Provenance.statistics` has of stages that were looked for and not chosen."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about. Never compared. `imposed` lists what the user asked for, and what a
    strategy comes to on the mesh of the plan (`constraints`); `margin` is None where it was not
    asked for. `options` are all that was asked, to plan again; `candidates` what was looked at,
    within the thresholds of `policy`."""

    autopar: str
    torch: str
    solver: str
    status: str
    objective_ns: Count
    bound_ns: Count
    gap_ppm: Count
    candidates: tuple[CandidateOutcome, ...] = ()
    imposed: tuple[str, ...] = ()
    margin: Margin | None = None
    statistics: dict[str, str] = {}
    options: PlanOptions = PlanOptions()
    policy: Policy = Policy()

    @property
    def is_proven(self) -> bool:
        """Whether no plan is known to be possible that is better by more than `PROVEN`."""
        return self.gap_ppm <= PROVEN * 1e6

    @property
    def is_fragile(self) -> bool | None:
        """Whether a plan of another structure is within `FRAGILE` of this one; None if unknown."""
        margin = self.margin
        most = self.objective_ns * (1 + FRAGILE)
        if margin is None:
            return None
        if margin.step_ns is not None and margin.step_ns < most:
            return True
        return None if margin.bound_ns < most else False
