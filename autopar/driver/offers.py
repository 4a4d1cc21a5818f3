"""The best plan so far of those that are tried, in one stage or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec

from autopar.compile import Say
from autopar.errors import InfeasibleError, StageError
from autopar.ir.units import format_ns
from autopar.plans.plan import Plan
from autopar.plans.request import Asked

_P = ParamSpec("_P")

_PLANNED = 3
"""Of how many shapes there are plans of all stages, at most."""


class Offers:
    """The best plan so far, at first the one in one stage if that is known, and why there was none
    where there was none."""

    def __init__(self, say: Say, plain: Plan | None = None) -> None:
        self.say = say
        self.best = plain
        self.failure: Exception | None = None

    def offer(self, make: Callable[_P, Plan], *args: _P.args, **kwargs: _P.kwargs) -> Plan | None:
        """Takes a plan, if there is one, and returns it."""
        try:
            plan = make(*args, **kwargs)
        except (InfeasibleError, StageError) as error:
            self.fail(error)
            return None
        step_ns = plan.estimates.step_ns
        self.say(f"step {format_ns(step_ns)}")
        if self.best is None or step_ns < self.best.estimates.step_ns:
            self.best = plan
        return plan

    def offer_any(
        self, make: Callable[[Asked, Say], Plan], asked: Sequence[Asked], say: Say
    ) -> bool:
        """Takes the plan of the first of those `asked` for of which there is one."""
        return any(self.offer(make, each, say) is not None for each in asked)

    def is_enough(self, number: int, step_ns: float) -> bool:
        """Whether there is a plan, and after so many others one that is thought to take `step_ns`
        is not worth its time: plans take longer than they are thought to."""
        if self.best is None:
            return False
        return number >= _PLANNED or step_ns >= self.best.estimates.step_ns

    def fail(self, error: Exception) -> None:
        """Why there is no such plan."""
        self.say(str(error))
        self.failure = self.failure or error

    def found(self) -> Plan:
        """The best plan; the first failure if there is none."""
        if self.best is None:
            raise self.failure or StageError("the devices are not shared by as many stages")
        return self.best
