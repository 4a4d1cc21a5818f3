"""A clock that tests move: seconds pass where a test says so, and HiGHS's runs are looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import highspy
import pytest

from autopar.solver import clock


@dataclass
class FakeClock:
    """Seconds since it was made, for all `Clock`s. Nothing but `now_s += ...` moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock that solvers read from now on."""
    fake = FakeClock()
    monkeypatch.setattr(clock, "monotonic", fake)
    return fake


@dataclass(frozen=True)
class Run:
    """A run of HiGHS: its kind, the seconds by the fake clock when it began, and how many more it
    was allowed to take."""

    kind: str
    began_s: float
    allowed_s: float


@dataclass
class Runs:
    """All runs of HiGHS, each of which takes `each_s` by the fake clock."""

    each_s: float
    seen: list[Run] = field(default_factory=list[Run])

    @property
    def kinds(self) -> set[str]:
        """The kinds of runs that were seen."""
        return {run.kind for run in self.seen}


def watch_runs(monkeypatch: pytest.MonkeyPatch, fake: FakeClock, each_s: float) -> Runs:
    """Notes what each run of HiGHS may take. Its limit of a linear program counts all runs of the
    instance so far, that of an integer program the run alone."""
    runs = Runs(each_s)

    class Watched(highspy.Highs):
        def run(self) -> highspy.HighsStatus:
            kinds = self.getLp().integrality_
            is_integer = any(kind == highspy.HighsVarType.kInteger for kind in kinds)
            kind = "integer" if is_integer else str(self.getOptionValue("solver")[1])
            limit_s = float(self.getOptionValue("time_limit")[1])
            allowed_s = limit_s - (0.0 if is_integer else self.getRunTime())
            runs.seen.append(Run(kind, fake.now_s, allowed_s))
            status = super().run()
            fake.now_s += runs.each_s
            return status

    monkeypatch.setattr(highspy, "Highs", Watched)
    return runs
