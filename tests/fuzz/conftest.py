"""What was drawn, beneath the results; too little that is hard is a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fuzz.drawn import OF_MODELS, OF_PLANS

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
    models = [model for model, _ in drawn]
    plans = [plan for _, plans in drawn for plan in plans]
    reporter.section(f"{len(models)} models under {len(plans)} plans")
    for every, shares in ((models, OF_MODELS), (plans, OF_PLANS)):
        counts = Counter(fact for facts in every for fact in facts)
        for fact, share in shares.items():
            missed = counts[fact] < share * len(every)
            reporter.line(f"{counts[fact]:5} {fact}{', too few' if missed else ''}", red=missed)
            if missed:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
