"""How a plan came about: by which search, with what proof, and among which candidates."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from autopar.plans.cluster_rates import Count
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.policy import Policy

FRAGILE = 0.005
"""A plan is fragile if its margin is less than this part of its step. Trifles, or errors of the
cost model, then decide between it and plans of another structure."""


PROVEN = 0.001
"""A plan whose gap is at most this part of its step counts as optimal. To close the rest takes long
if resources share a window, and prices are not that exact."""

CLOSE = 0.01
"""A gap of more than this part of a step is worth a warning: the step is known about so well."""


class Margin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best plan of another structure (`weight_layouts`). `bound_ns` is a lower bound on the
    steps of all of them, and `step_ns` the step of the best one known, None if none is. `rival`
    says how that differs. They are steps as modelled (`Estimates.modelled_ns`), not differences."""

    bound_ns: Count
    step_ns: Count | None
    rival: str


INTERRUPTED = "interrupted"
"""The status of the best plan so far, where Ctrl-C ended the search."""

LIMITED, WORK_LIMIT = "limited", "the search came to its limit of work"
"""The status of the best plan so far, where the limit of work ended the search, and why candidates
were not looked at. What is proven is of those that were looked at to their end."""

OutcomeKind = Literal["planned", "estimated", "not better", "infeasible", "skipped"]
"""What may become of a candidate."""


class CandidateOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a `candidate` of the search. If it was `planned`, it takes `ns`; if
    `estimated` from the times of segments, about `ns`; if `not better`, no plan of it takes less
    than `ns`. It is `infeasible`, or `skipped` untried, for a `reason`; or it was not looked at to
    its end for one. Nanoseconds of one stage are as modelled, of several as simulated."""

    candidate: str
    result: OutcomeKind
    ns: Count | None = None
    reason: str = ""


class SearchStep(str):
    """A text of progress from a search, with the `outcomes` of its candidates so far. It says of
    work that is done: about `work_ns` CPU nanoseconds, counted, and so the same in every run. A
    `plan` is a candidate's that fits, while a better one is looked for. A search that has come to
    its limit ends at a text where it `may_end`: nothing is half worked out there."""

    outcomes: tuple[CandidateOutcome, ...]
    work_ns: int
    plan: Any
    may_end: bool

    def __new__(
        cls,
        text: str,
        outcomes: tuple[CandidateOutcome, ...] = (),
        work_ns: int = 0,
        plan: Any = None,
        *,
        may_end: bool = False,
    ) -> SearchStep:
        step = super().__new__(cls, text)
        step.outcomes, step.work_ns, step.plan = outcomes, work_ns, plan
        step.may_end = may_end
        return step

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """In another process, or for a copy, it is the text."""
        return str, (str(self),)

    @property
    def best(self) -> CandidateOutcome | None:
        """The best of those that are planned; None if there is none."""
        planned = [each for each in self.outcomes if each.result == "planned"]
        return min(planned, key=lambda each: each.ns or 0, default=None)


IN_STAGES = "in_stages"
"""The key in `Provenance.statistics` for plans in stages that were searched and not chosen."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about; never compared. `imposed` lists the user's constraints, and what a
    strategy means on the mesh of the plan (`constraints`). `margin` is None if it was not
    requested. `options` are all options, to plan again. `candidates` are those of the search,
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
    def is_interrupted(self) -> bool:
        """Whether the search was ended before it was over."""
        return self.status == INTERRUPTED

    @property
    def is_limited(self) -> bool:
        """Whether the search ended at its limit of work."""
        return self.status == LIMITED

    @property
    def is_proven(self) -> bool:
        """Whether no plan can be better by more than `PROVEN`, as far as is known."""
        return self.gap_ppm <= PROVEN * 1e6 and not self.is_limited

    @property
    def is_close(self) -> bool:
        """Whether no plan can be better by more than `CLOSE`, as far as is known."""
        return self.gap_ppm <= CLOSE * 1e6

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
