"""No request that leaves less open has a shorter step, whatever is modelled and simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.narrower import Widened
from autopar.errors import InfeasibleError, SolverError
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import GraphRequest
from autopar.solver.search import silent

Form = tuple[int, int, bool, int]
"""Chunks of the loss, microbatches, whether parameters are on the host, axes of the mesh."""
FORMS: list[Form] = [*product((1, 4), (1, 2), (False, True), (2, 3))]
Costs = dict[Form, tuple[int, int]]
"""As modelled, and as simulated."""


def options(chunks: int | None, count: int | None, residency: str, mesh: str) -> Options:
    return Options(loss_chunks=chunks, microbatches=count, residency=residency, mesh=mesh)


REQUESTS = [
    options(*each)
    for each in product((1, None), (1, None), ("cuda", "auto"), ("auto:2", "auto", "auto:3"))
]


def admits(asked: Options, form: Form, unasked: frozenset[Form]) -> bool:
    """Whether a plan of such a form is looked at; of three axes unasked some are."""
    chunks, count, hosted, axes = form
    fine = asked.mesh == "auto:3" or (asked.mesh == "auto" and form in unasked)
    return (
        (chunks == 1 or asked.loss_chunks is None)
        and (count == 1 or asked.microbatches is None)
        and (not hosted or asked.residency == "auto")
        and (axes == 2 or fine)
    )


def finding(asked: GraphRequest, form: Form, modelled: int, simulated: int) -> Finding:
    chunks, count, hosted, axes = form
    request = SimpleNamespace(
        loss_chunks=chunks, microbatches=count, params_on_host=frozenset("w" if hosted else ""),
        mesh=SimpleNamespace(sizes=(2,) * axes),
    )  # fmt: skip
    stages = (SimpleNamespace(request=request),)
    estimates = cast("Any", SimpleNamespace(step_ns=simulated))
    return Finding(asked, cast("Any", stages), estimates, modelled, modelled, "optimal")


def searched(costs: Costs, unasked: frozenset[Form], asked: GraphRequest) -> Finding:
    known = [(costs[f], f) for f in FORMS if f in costs and admits(asked.options, f, unasked)]
    if not known:
        raise InfeasibleError("nothing fits")
    (modelled, simulated), form = min(known)
    return finding(asked, form, modelled, simulated)


def with_narrower(
    find: Callable[[GraphRequest, Trail], Finding], asked: GraphRequest, trail: Trail
) -> Finding:
    widened = Widened(asked, trail)
    for each in widened:
        with widened.attempt() as tried:
            tried.result = find(each, trail)
    return widened.result()


def best(costs: Costs, unasked: frozenset[Form], wanted: Options) -> Finding | None:
    asked = GraphRequest(cast("Any", None), cast("Any", None), wanted)
    try:
        return with_narrower(lambda each, _: searched(costs, unasked, each), asked, Trail(silent))
    except InfeasibleError:
        return None


def leaves_less_open(narrow: Options, wide: Options) -> bool:
    meshes = ("auto:2", "auto", "auto:3")
    return (
        narrow.loss_chunks in (1, wide.loss_chunks)
        and narrow.microbatches in (1, wide.microbatches)
        and narrow.residency in ("cuda", wide.residency)
        and meshes.index(narrow.mesh) <= meshes.index(wide.mesh)
    )


some_costs = st.dictionaries(
    st.sampled_from(FORMS), st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=len(FORMS)
)


@given(some_costs, st.frozensets(st.sampled_from(FORMS)), st.sampled_from(REQUESTS))
def test_no_narrower_request_has_a_shorter_step(
    costs: Costs, unasked: frozenset[Form], wide: Options
) -> None:
    found = best(costs, unasked, wide)
    for narrow in REQUESTS:
        if leaves_less_open(narrow, wide):
            other = best(costs, unasked, narrow)
            if other is not None:
                assert found is not None
                assert found.step_ns <= other.step_ns


def test_what_is_proven_is_said_of_the_plan_that_is_taken() -> None:
    costs = {(4, 1, False, 2): (10, 9), (1, 1, False, 2): (12, 8)}
    found = best(costs, frozenset(), options(None, 1, "cuda", "auto:2"))
    assert found is not None
    assert (found.step_ns, found.objective_ns, found.bound_ns) == (8, 12, 10)
    assert found.status == "feasible"


def test_nothing_is_looked_for_twice_where_the_plan_makes_use_of_nothing() -> None:
    looked: list[Options] = []

    def find(asked: GraphRequest, _: Trail) -> Finding:
        looked.append(asked.options)
        return finding(asked, (1, 1, False, 2), 10, 10)

    wanted = options(None, None, "auto", "auto:3")
    asked = GraphRequest(cast("Any", None), cast("Any", None), wanted)
    assert with_narrower(find, asked, Trail(silent)).step_ns == 10
    assert looked == [wanted]


def test_a_narrower_search_that_takes_too_long_loses_no_plan() -> None:
    def find(asked: GraphRequest, _: Trail) -> Finding:
        if asked.options.loss_chunks == 1:
            raise SolverError("no plan was found in time")
        return finding(asked, (4, 1, False, 2), 10, 9)

    wanted = options(None, 1, "cuda", "auto:2")
    asked = GraphRequest(cast("Any", None), cast("Any", None), wanted)
    assert with_narrower(find, asked, Trail(silent)).step_ns == 9


def test_what_was_looked_at_on_the_way_is_known_of_the_plan_that_is_taken() -> None:
    """A margin says what no plan of another structure beats, of all that are admitted."""

    def find(asked: GraphRequest, _: Trail) -> Finding:
        if asked.options.loss_chunks == 1:
            return replace(finding(asked, (1, 1, False, 2), 12, 8), others=(Other("a", 12),))
        return replace(finding(asked, (4, 1, False, 2), 10, 9), others=(Other("b", 11),))

    wanted = options(None, 1, "cuda", "auto:2")
    found = with_narrower(
        find, GraphRequest(cast("Any", None), cast("Any", None), wanted), Trail(silent)
    )
    assert found.step_ns == 8
    assert [(each.name, each.bound_ns) for each in found.others] == [("a", 12), ("b", 11)]
