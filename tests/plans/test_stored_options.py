"""What is asked for beside a stored plan: nothing, or what it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import ArgumentError
from autopar.plans.compatibility import stored_options
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from tests.grouped import grouped
from tests.report.plans import Order, staged_plan, two_axis_plan, with_stage

OPEN: dict[str, Any] = {"microbatches": "auto", "stages": "auto"}
INTERLEAVED = staged_plan(Order("interleaved:2", 2))


def one_stage(microbatches: int = 4) -> Plan:
    return with_stage(two_axis_plan(), microbatches=microbatches)


def asked(plan: Plan, **options: Any) -> Any:
    return stored_options(make_options(**grouped(**OPEN | options)), plan.structure)


def test_what_is_open_is_as_the_plan_has_it() -> None:
    found = asked(one_stage())
    assert (found.microbatches, found.stages, found.is_staged) == (4, 1, False)
    found = asked(INTERLEAVED)
    assert (found.stages, found.microbatches, found.schedule) == (4, 2, "interleaved:2")
    assert found.cuts == ("model.layers.4", "model.layers.8", "model.layers.12")
    one = staged_plan(Order("interleaved:1", 2))
    assert asked(one).schedule == "interleaved:1", "not two stages on each rank"


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2}, {"stages": 4}, {"schedule": "interleaved"},
        {"schedule": "interleaved:2"},
        {"cuts": ("model.layers.4", "model.layers.8", "model.layers.12")},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_so_may_be_said(options: dict[str, Any]) -> None:
    found, unsaid = asked(INTERLEAVED, **options), asked(INTERLEAVED)
    assert found == replace(unsaid, given=found.given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 8}, "microbatches=8: the plan has 2, "),
        ({"microbatches": 1}, "microbatches=1: the plan has 2, "),
        ({"stages": 2}, "stages=2: the plan has 4, "),
        ({"stages": 1}, "stages=1: the plan has 4, "),
        ({"schedule": "1f1b"}, "schedule='1f1b': the plan has interleaved:2, "),
        ({"schedule": "interleaved:4"}, "schedule='interleaved:4': the plan has interleaved:2, "),
        (
            {"cuts": "model.layers.5"},
            "cuts='model.layers.5': the plan has model.layers.4, model.layers.8, model.layers.12, ",
        ),
        ({"loss_chunks": 3}, "loss_chunks=3: the plan has 1, "),
    ],
    ids=str,
)
def test_what_contradicts_the_plan_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        asked(INTERLEAVED, **options)
    assert words in str(error.value) and "leave" in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 8}, "microbatches=8: the plan has 4, "),
        ({"stages": 2}, "stages=2: the plan has 1, "),
        ({"schedule": "gpipe"}, "schedule='gpipe': the plan has 1f1b, "),
        ({"cuts": "layers.5"}, "cuts='layers.5': the plan has none, "),
    ],
    ids=str,
)
def test_stages_beside_a_plan_of_one(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        asked(one_stage(), **options)


def test_a_schedule_of_no_stages_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="schedule='zb-h1': that is of stages; say how many"):
        make_options(pipeline={"schedule": "zb-h1"})
    for stages in (2, "auto"):
        assert make_options(pipeline={"stages": stages, "schedule": "gpipe"})
