"""The methods with which plans and frontiers show themselves.

Their results are made by modules of upper layers, in `pages`, which the package registers
(`show_with`) when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from autopar.plans.frontier import Frontier
    from autopar.plans.plan import Plan
    from autopar.report.frontier import FrontierSummary
    from autopar.report.reasons import Reasons
    from autopar.report.summary import Summary
    from autopar.report.verdict import Verdict


_makers: list[Callable[[], Any]] = []


def show_with(pages: Callable[[], Any]) -> None:
    """Plans show themselves with what `pages` returns: the module `driver.pages`."""
    _makers[:] = [pages]


def _pages() -> Any:
    return _makers[0]()


class Shown:
    """Base of `Plan`."""

    __slots__ = ()

    def summary(self) -> Summary:
        """What the plan decided and what it costs, as values; printed, it is the page of `autopar
        show`."""
        return _pages().summarize(_plan(self))

    def explain(
        self,
        name: str = "",
        *,
        model: Any = None,
        inputs: Any = None,
        cluster: Any = None,
        profile: Any = None,
        stage: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Reasons:
        """Why a parameter, a module or an op (by its key) is as it is, or all of the plan; printed,
        it is the page of `autopar explain`.

        With the `model` and `inputs` that were planned, the alternatives too: see
        `alternatives.explain_plan`, which has the other arguments and the errors.
        """
        how = {"cluster": cluster, "profile": profile, "stage": stage, "progress": progress}
        return _pages().explain(_plan(self), name, model, inputs, **how)

    def diff(self, other: Plan, fail_over: str = "") -> Verdict:
        """What is different in `other`, and whether it counts; printed, it is the page of `autopar
        diff`. `fail_over` is as there (`time=2%,memory=1%`); without it every decision counts, and
        estimates that moved by more than 1 %."""
        return _pages().judged(_plan(self), other, fail_over)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """For notebooks: as text, a plan is its page, not all of its fields."""
        return {"text/plain": str(self.summary()), "text/html": self._repr_html_()}


class ShownFrontier:
    """Base of `Frontier`."""

    __slots__ = ()

    def summary(self) -> FrontierSummary:
        """The figures of all points, as values; printed, it is the page of `autopar plan
        --frontier`."""
        return _pages().summarize_frontier(cast("Frontier", self))

    def __str__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()  # pyright: ignore[reportPrivateUsage]


def _plan(shown: Shown) -> Plan:
    """`shown` as a plan: no other class has this base."""
    return cast("Plan", shown)
