"""Ctrl-C ends a search with the best plan so far, wherever it comes."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from typing import Any

import pytest

from autopar import Plan
from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.errors import InterruptedSearchWarning
from autopar.plans.provenance import SearchStep
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from tests.codegen.models import case

COMPILE = importlib.import_module("autopar.compile")
PLAIN = COMPILE.solve

REQUESTS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "stages": {"pipeline": {"stages": 2}},
    "stages, open": {"pipeline": {"stages": "auto"}},
}


class Interrupted:
    """`solve`, interrupted in call `number`; never, if that is 0."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            raise KeyboardInterrupt
        return PLAIN(*args, **kwargs)


def planned(
    name: str, monkeypatch: pytest.MonkeyPatch, number: int, *, stops: bool = True
) -> tuple[Plan | None, int, int | None]:
    """The plan, None if there is none, if the search is interrupted in solve `number`; the number
    of solves; and the best that was told of."""
    solve, graph, best = Interrupted(number), case("llama").traced.graph, list[int]()
    monkeypatch.setattr(COMPILE, "solve", solve)

    def say(text: str) -> None:
        if isinstance(text, SearchStep) and text.best is not None:
            best.append(text.best.ns or 0)

    asked = make_graph_request(graph, parse_cluster("4xH100"), make_options(**REQUESTS[name]))
    plan = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", InterruptedSearchWarning)
        with suppress(KeyboardInterrupt):
            plan = answer(asked, say, stops=stops)
            assert plan.provenance.is_interrupted == bool(told) == bool(number)
    return plan, solve.calls, min(best, default=None)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_best_so_far_is_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, most, _ = planned(name, monkeypatch, 0)
    assert whole is not None
    assert planned(name, monkeypatch, 1) == (None, 1, None)
    assert planned(name, monkeypatch, most, stops=False)[0] is None
    for number in sorted({most // 2, 3 * most // 4, most} - {0, 1}):
        plan, solves, best = planned(name, monkeypatch, number)
        assert solves == number, "nothing more is solved"
        assert (plan is None) == (best is None)
        if plan is not None:
            assert Plan.from_bytes(plan.to_bytes(), "again") == plan
            assert plan.provenance.bound_ns in (0, whole.provenance.bound_ns)
            modelled_ns = plan.provenance.objective_ns
            assert best in (modelled_ns, plan.estimates.step_ns)
