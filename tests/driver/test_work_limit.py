"""The limit of work ends a search with the best plan so far, the same one in every run."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import Plan
from autopar.cluster.parsing import parse_cluster
from autopar.driver.gate.golden import write_golden
from autopar.driver.planning import answer
from autopar.driver.search.incumbent import Stopped, Trail
from autopar.driver.search.meshes import in_one_stage, survey
from autopar.driver.search.stages_if_needed import shortest
from autopar.errors import ArgumentError, InfeasibleError, PlanError
from autopar.plans.provenance import LIMITED, WORK_LIMIT, SearchStep
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.report.cautions import cautions
from autopar.report.summary import summarize
from autopar.solver.search import silent
from tests.codegen.models import case

TIGHT: dict[str, Any] = {"microbatches": "auto", "memory": {"limit": "400KiB"}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one stage": ("4xH100", {}),
    "memory binds": ("2xH100", TIGHT),
    "stages": ("4xH100", {"pipeline": {"stages": "auto"}}),
}


def planned(
    work_s: float | None, cluster: str = "4xH100", options: dict[str, Any] | None = None
) -> tuple[Plan, list[float]]:
    """The plan of a small Llama, with a limit of work if one is given, and the work after each
    step of the search, in seconds."""
    done = [0.0]

    def say(text: str) -> None:
        if isinstance(text, SearchStep) and text.work_ns:
            done.append(done[-1] + text.work_ns / 1e9)

    asked = make_graph_request(
        case("llama").traced.graph, parse_cluster(cluster), make_options(**(options or {}))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.driver.planning.Trail", limited_to(work_s))
        return answer(asked, say), done


def limited_to(work_s: float | None) -> Any:
    def make(say: Any, *, stops: bool, work_limit_s: float = 0) -> Trail:
        is_own = work_s is None or not work_limit_s
        return Trail(say, stops=stops, work_limit_s=work_limit_s if is_own else work_s)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_so_far_is_a_plan_and_the_same_each_time(kind: str) -> None:
    whole, done = planned(None, *KINDS[kind])
    assert len(done) > 4 and whole.provenance.status != LIMITED
    steps_ns = list[int]()
    for limit_s in (done[1] / 2, done[len(done) // 2], done[-2]):
        plan, spent = planned(limit_s, *KINDS[kind])
        assert plan == planned(limit_s, *KINDS[kind])[0]
        assert spent == done[: len(spent)], "the same work up to the limit"
        if not plan.provenance.is_limited:
            assert plan == whole, "nothing was left out"
            continue
        assert any(each.reason == WORK_LIMIT for each in plan.provenance.candidates)
        assert plan.provenance.bound_ns <= plan.provenance.objective_ns
        assert Plan.from_bytes(plan.to_bytes(), "again") == plan
        steps_ns.append(plan.estimates.step_ns)
    assert steps_ns and steps_ns == sorted(steps_ns, reverse=True), "more work is no worse"
    assert steps_ns[-1] >= whole.estimates.step_ns


@pytest.mark.parametrize("work_s", [0, 1e9])
def test_a_limit_that_is_not_come_to_changes_nothing(work_s: float) -> None:
    assert planned(work_s)[0] == planned(None)[0]


def test_before_there_is_a_plan_nothing_ends_a_search() -> None:
    plan, _ = planned(1e-9, "2xH100", TIGHT)
    assert plan.estimates.memory.total <= 400 * 1024
    with pytest.raises(InfeasibleError, match="What would do"):
        planned(1e-9, "2xH100", {"memory": {"limit": "1KiB"}})


def test_what_was_not_looked_at_is_said(tmp_path: Any) -> None:
    plan, _ = planned(1e-9, options={"search": {"margin": True}})
    assert plan.provenance.margin is None
    (said,) = [text for text in cautions(plan) if "limit of work" in text]
    assert "or not to its end: 2 candidates" in said and "and for a margin" in said
    assert "of the candidates looked at" in f"{summarize(plan)}"
    with pytest.raises(PlanError, match=r"Raise search\.work_limit"):
        write_golden(plan, tmp_path / "golden.json", allow_gap=False)
    write_golden(plan, tmp_path / "golden.json", allow_gap=True)


@pytest.mark.parametrize("given", [-1, "much", True, 1.5])
def test_what_is_no_limit(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"search.work_limit=.*0 for no limit"):
        make_options(search={"work_limit": given})


def test_progress_of_work_ends_a_search_only_with_a_plan() -> None:
    trail = Trail(silent, work_limit_s=1)
    trail(SearchStep("priced", work_ns=2 * 10**9, may_end=True))
    assert not trail.is_stopped
    trail.note("first", "planned", 5)
    trail(SearchStep("solved", work_ns=1))
    with pytest.raises(Stopped):
        trail(SearchStep("priced", may_end=True))
    assert trail.is_limited


def test_a_search_within_another_ends_at_the_limit_of_that() -> None:
    trail = Trail(silent, work_limit_s=1)
    trail.note("first", "planned", 5)
    within = Trail(trail)
    within(SearchStep("solved", work_ns=2 * 10**9))
    with pytest.raises(Stopped):
        within(SearchStep("priced", may_end=True))


def test_a_search_that_begins_again_has_its_own_limit() -> None:
    trail = Trail(silent, work_limit_s=1)
    trail.note("first", "infeasible", 5)
    trail(SearchStep("priced", work_ns=2 * 10**9, may_end=True))
    trail.restart()
    trail.note("second", "planned", 5)
    trail(SearchStep("priced", work_ns=1, may_end=True))
    assert not trail.is_stopped and [each.candidate for each in trail.outcomes] == ["second"]


def test_of_the_plans_that_were_made_the_one_with_the_shortest_step_is_taken() -> None:
    """The best as modelled, which the search goes by, may be another one."""
    graph, cluster, trail = case("llama").traced.graph, parse_cluster("2xH100"), Trail(silent)
    for count in (4, 2, 1):
        asked = make_graph_request(graph, cluster, make_options(mesh="2", microbatches=count))
        best = survey(asked, trail)
    assert len(trail.planned) == 3
    longest = max(trail.planned, key=lambda each: each.estimates.step_ns)
    found = shortest(in_one_stage(asked, longest, best.others), trail)
    assert found.step_ns == min(each.estimates.step_ns for each in trail.planned)
    assert found.step_ns < longest.estimates.step_ns
    assert shortest(found, trail) is found
