"""The pytest plugin: the fixture `plan_regression`, and the option `--update-plans`.

It works like pytest-regressions. A golden plan lies beside its test, in a folder of the test file's
name. A missing one is written, and the test fails once. Importing this module does not import
torch.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

_LONGEST = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-plans`."""
    parser.getgroup("autopar").addoption(
        "--update-plans",
        action="store_true",
        default=False,
        help="write the golden plans of plan_regression that differ or are missing",
    )


@pytest.fixture
def plan_regression(request: pytest.FixtureRequest) -> PlanRegression:
    """Compares plans with golden ones beside the test."""
    folder = Path(request.path).with_suffix("")
    update = bool(request.config.getoption("--update-plans"))
    return PlanRegression(folder, name_of_test(request.node.nodeid), update)


class PlanRegression:
    """Compares plans of a test with golden ones, in `folder` under the test's `name`."""

    def __init__(self, folder: Path, name: str, update: bool) -> None:
        self._folder, self._name, self._update = folder, name, update
        self._used: set[str] = set()

    def __call__(
        self,
        model: Any,
        inputs: Any,
        *,
        cluster: Any,
        name: str = "",
        fail_over: str | None = None,
        allow_gap: bool = False,
        **options: Any,
    ) -> Plan:
        """Plan `model` with the options of `autopar.plan`, `check` the plan and return it. The
        cluster must be named: a golden plan is the same wherever the test runs."""
        from autopar import plan

        planned = plan(model, inputs, cluster=cluster, **options)
        self.check(planned, name, fail_over=fail_over, allow_gap=allow_gap)
        return planned

    def check(
        self, plan: Plan, name: str = "", *, fail_over: str | None = None, allow_gap: bool = False
    ) -> None:
        """Fail the test, and print the difference, unless `plan` is the golden one.

        A test with several plans gives each a `name`. `fail_over` says what counts, as in
        `autopar diff`. A plan that is not proven optimal is written only with `allow_gap`.
        """
        from autopar.plans.plan import Plan
        from autopar.report.difference import compare
        from autopar.report.verdict import SAME, judge, parse_bounds

        path = self._path(name)
        bounds = None if fail_over is None or self._update else parse_bounds(fail_over)
        if not path.exists():
            self._write(plan, path, allow_gap)
            if not self._update:
                pytest.fail(f"{path} was missing and is made: look at it, and keep it", False)
            return
        verdict = judge(compare(Plan.load(path), plan), bounds)
        if verdict.status == SAME:
            return
        if self._update:
            self._write(plan, path, allow_gap)
            return
        pytest.fail(f"{path}: --update-plans writes it anew\n\n{verdict}", False)

    def _path(self, name: str) -> Path:
        stem = safe_name(f"{self._name}.{name}" if name else self._name)
        if stem in self._used:
            pytest.fail(f"this test has a plan {stem} already: give each a name", False)
        self._used.add(stem)
        return self._folder / f"{stem}.plan.json"

    def _write(self, plan: Plan, path: Path, allow_gap: bool) -> None:
        from autopar.driver.gate.golden import write_golden
        from autopar.errors import PlanError

        try:
            write_golden(plan, path, allow_gap)
        except PlanError as error:
            pytest.fail(str(error), False)


def name_of_test(node_id: str) -> str:
    """`TestPlans.test_llama-8x8` of `tests/test_plans.py::TestPlans::test_llama[8x8]`."""
    names = node_id.split("::", 1)[-1]
    test, bracket, parameters = names.partition("[")
    test = test.replace("::", ".")
    return safe_name(f"{test}-{parameters.removesuffix(']')}" if bracket else test)


def safe_name(name: str) -> str:
    """`name` as that of a file: equal only for equal names."""
    safe = _UNSAFE.sub("_", name)
    if safe == name and len(name) <= _LONGEST:
        return name
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{safe[:_LONGEST]}-{digest}"
