"""What the search looked at, in words."""

from __future__ import annotations

import json

import msgspec

from autopar.plans.plan import Plan
from autopar.plans.provenance import CandidateOutcome
from autopar.plans.requests.policy import Policy, other_thresholds, policy_now
from autopar.report.cautions import searched_lines, searched_text
from autopar.report.html.page import content, html
from tests.report.plans import two_axis_plan

MS = 1_000_000
OUTCOMES = (
    CandidateOutcome("mesh dp=8", "planned", 34 * MS),
    CandidateOutcome("mesh dp=2,tp=4", "not better", 36 * MS),
    CandidateOutcome("2 stages, 4 microbatches (1f1b)", "estimated", 35 * MS),
    CandidateOutcome("mesh dp=4,tp=2", "infeasible", None, "1 GiB is missing"),
    CandidateOutcome("meshes dp=2,cp=2,tp=2", "skipped", None, "refined_within 0.05"),
    CandidateOutcome("other pipelines (3)", "skipped", None, "pipelines_planned 3"),
)


def looked(*outcomes: CandidateOutcome) -> Plan:
    plan = two_axis_plan()
    return msgspec.structs.replace(
        plan, provenance=msgspec.structs.replace(plan.provenance, candidates=outcomes)
    )


def test_how_many_there_were_and_what_was_left_out() -> None:
    plan = looked(*OUTCOMES)
    told = searched_text(plan.provenance)
    assert told == (
        "4 candidates: 1 planned, 1 not better, 1 estimated, 1 infeasible; not looked at: "
        "refined_within 0.05, pipelines_planned 3"
    )
    assert "4 candidates" in str(plan.summary())
    assert searched_text(looked(OUTCOMES[0]).provenance) == ""
    assert [*searched_lines(looked(OUTCOMES[0]).provenance)] == []


def test_the_page_lists_them() -> None:
    plan = looked(*OUTCOMES)
    assert content(plan).headline.facts["Candidates"] == (
        "mesh dp=8: planned, 34 ms",
        "mesh dp=2,tp=4: not better, at least 36 ms",
        "2 stages, 4 microbatches (1f1b): estimated, 35 ms",
        "mesh dp=4,tp=2: infeasible: 1 GiB is missing",
        "meshes dp=2,cp=2,tp=2: skipped: refined_within 0.05",
        "other pipelines (3): skipped: pipelines_planned 3",
    )
    assert b"1 GiB is missing" in html(plan)


def test_a_file_has_them_and_the_thresholds() -> None:
    plan = looked(*OUTCOMES)
    assert Plan.from_bytes(plan.to_bytes()) == plan
    written = json.loads(plan.to_bytes())["provenance"]
    assert [each["candidate"] for each in written["candidates"]] == [o.candidate for o in OUTCOMES]
    assert written["policy"] == msgspec.structs.asdict(Policy())


def test_other_thresholds_hold_within() -> None:
    usual = policy_now()
    with other_thresholds(refined_most=1) as policy:
        assert policy_now() is policy and policy.refined_most == 1
        with other_thresholds(chunks_worth=8):
            assert (policy_now().refined_most, policy_now().chunks_worth) == (1, 8)
    assert policy_now() is usual
