"""What was drawn, beneath the results; too little that is hard is a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fuzz.drawn import AT_LEAST

ENOUGH = 100
"""Of fewer models, shares say little."""


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    drawn = [
        value
        for report in reporter.getreports("passed")
        for name, value in report.user_properties
        if name == "drawn"
    ]
    if len(drawn) < ENOUGH:
        return
    plans = [plan for _, plans in drawn for plan in plans]
    reporter.section(f"{len(drawn)} models under {len(plans)} plans")
    models = Counter(fact for model, _ in drawn for fact in model)
    planned = Counter(fact for plan in plans for fact in plan)
    for fact, share in AT_LEAST.items():
        count, of, what = models[fact], len(drawn), "models"
        if fact in planned or not count:
            count, of, what = planned[fact], len(plans), "plans"
        missed = count < share * of
        reporter.line(f"{count:5} {what:6} {fact}{', too few' if missed else ''}", red=missed)
        if missed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
