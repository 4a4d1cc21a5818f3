"""The caller's time limit and the time left, and the work that is done, counted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic


def _now() -> float:
    return monotonic()


@dataclass(slots=True)
class Clock:
    """The time left of the caller's limit; without a limit no clock is read. `work_ns` is the work
    so far: about the CPU nanoseconds that it takes, counted, and so the same in every run."""

    limit_s: float | None
    started: float = field(default_factory=_now)
    work_ns: int = 0

    def left_s(self) -> float:
        """Seconds left, at least 0; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return max(0.0, self.limit_s - (_now() - self.started))

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.left_s() <= 0

    def count(self, work_ns: int) -> None:
        """Adds work that is done."""
        self.work_ns += work_ns

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Inside, no time passes."""
        began = _now()
        try:
            yield
        finally:
            self.started += _now() - began
