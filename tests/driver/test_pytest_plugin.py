"""The fixture `plan_regression`, in test sessions of its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from autopar.driver.pytest_plugin import name_of_test
from autopar.plans.plan import Plan
from tests.report.plans import two_axis_plan

pytest_plugins = ["pytester"]

PLUGIN = "autopar.driver.pytest_plugin"
CHECKS = """
import msgspec, pytest
from autopar.plans.plan import Plan
from tests.redone import repriced

def changed(plan, step_ns):
    return msgspec.structs.replace(
        plan, estimates=repriced(plan.estimates, step_ns=step_ns))
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    two_axis_plan().save(pytester.path / "made.json")
    return pytester


def run(
    session: pytest.Pytester, body: str, *options: str, apart: bool = False
) -> pytest.RunResult:
    """A session over a file with the tests `body`, in a process of its own if it is to be `apart`.
    The plugin is loaded as users load it, by its entry point, or, where autopar is not installed
    from here, by name."""
    session.makepyfile(test_gate=CHECKS + body)
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    by_name = () if installed else ("-p", PLUGIN)
    arguments = "-p", "no:cacheprovider", *by_name, *options
    if apart:
        return session.runpytest_subprocess(*arguments)
    return session.runpytest_inprocess(*arguments)


CHECK = """
def test_plan(plan_regression):
    plan_regression.check(changed(Plan.load("made.json"), {step_ns}), allow_gap=True)
"""


def test_a_plan_is_made_kept_compared_and_updated(session: pytest.Pytester) -> None:
    golden = session.path / "test_gate" / "test_plan.plan.json"
    first = run(session, CHECK.format(step_ns=34_000_000))
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(["*test_plan.plan.json was missing and is made*"])
    assert Plan.load(golden).estimates.step_ns == 34_000_000

    run(session, CHECK.format(step_ns=34_000_000)).assert_outcomes(passed=1)
    run(session, CHECK.format(step_ns=34_100_000)).assert_outcomes(passed=1)

    worse = run(session, CHECK.format(step_ns=40_000_000))
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines([
        "*test_plan.plan.json: --update-plans writes it anew",
        "*different: estimates moved (step)",
        "*step *34 ms *40 ms *+17.6 %",
    ])  # fmt: skip
    assert Plan.load(golden).estimates.step_ns == 34_000_000

    run(session, CHECK.format(step_ns=40_000_000), "--update-plans").assert_outcomes(passed=1)
    assert Plan.load(golden).estimates.step_ns == 40_000_000


def test_parameters_names_and_bounds(session: pytest.Pytester) -> None:
    body = """
@pytest.mark.parametrize("name", ["8x8", "a/../b", "a b"])
def test_many(plan_regression, name):
    plan = Plan.load("made.json")
    plan_regression.check(plan, allow_gap=True)
    plan_regression.check(plan, "second", allow_gap=True)
    plan_regression.check(changed(plan, 40_000_000), "third", fail_over="memory=1%", allow_gap=True)

class TestIn:
    def test_class(self, plan_regression):
        plan_regression.check(Plan.load("made.json"), allow_gap=True)

def test_twice(plan_regression):
    for _ in range(2):
        plan_regression.check(Plan.load("made.json"), allow_gap=True)

def test_gap(plan_regression):
    plan_regression.check(Plan.load("made.json"))
"""
    made = run(session, body, "--update-plans")
    made.assert_outcomes(passed=4, failed=2)
    made.stdout.fnmatch_lines_random([
        "*this test has a plan test_twice already: give each a name*",
        "*test_gap.plan.json is not written: its plan is not proven optimal*",
    ])  # fmt: skip
    files = sorted(path.name for path in (session.path / "test_gate").iterdir())
    assert len(files) == 11
    assert {"TestIn.test_class.plan.json", "test_many-8x8.plan.json"} <= set(files)
    assert {"test_many-8x8.second.plan.json", "test_twice.plan.json"} <= set(files)
    golden = session.path / "test_gate" / "test_many-8x8.third.plan.json"
    two_axis_plan().save(golden)
    kept = run(session, body, "-k", "many")
    kept.assert_outcomes(passed=3, deselected=3)


def test_a_model_is_planned_where_it_is_tested(session: pytest.Pytester) -> None:
    body = """
def test_model(plan_regression):
    import torch
    model, inputs = torch.nn.Linear(64, 32), torch.zeros(16, 64)
    plan = plan_regression(model, inputs, cluster="4xA100", mesh="4", optimizer="sgd")
    assert plan.world_size == 4

def test_cluster_is_named(plan_regression):
    with pytest.raises(TypeError, match="cluster"):
        plan_regression(None, None)
"""
    run(session, body, "--update-plans", apart=True).assert_outcomes(passed=2)
    golden = Plan.load(session.path / "test_gate" / "test_model.plan.json")
    assert (golden.structure.cluster, golden.structure.optimizer) == ("4xA100", "sgd")


def test_pytest_starts_without_torch(session: pytest.Pytester) -> None:
    body = """
import sys
def test_start(plan_regression):
    assert "torch" not in sys.modules
    assert "numpy" not in sys.modules
"""
    run(session, body, apart=True).assert_outcomes(passed=1)


def test_names_of_files_differ_where_tests_do() -> None:
    ids = [
        "tests/test_a.py::test_x", "tests/test_a.py::test_x[a]", "tests/test_a.py::test_x[a_b]",
        "tests/test_a.py::test_x[a b]", "tests/test_a.py::test_x[a/b]", "test_a.py::A::test_x",
        "test_a.py::test_x[a::b]",
        f"test_a.py::test_x[{'y' * 300}]",
        f"test_a.py::test_x[{'y' * 301}]",
    ]  # fmt: skip
    names = [name_of_test(each) for each in ids]
    assert len({name.lower() for name in names}) == len(ids)
    assert names[:3] == ["test_x", "test_x-a", "test_x-a_b"]
    assert all(Path(name).name == name and len(name) < 120 for name in names)
