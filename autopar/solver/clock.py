"""The caller's time limit, and the time left."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic


def _now() -> float:
    return monotonic()


@dataclass(slots=True)
class Clock:
    """The time left of the caller's limit; without a limit no clock is read."""

    limit_s: float | None
    started: float = field(default_factory=_now)

    def left_s(self) -> float:
        """Seconds left, at least 0; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return max(0.0, self.limit_s - (_now() - self.started))

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.left_s() <= 0

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Inside, no time passes."""
        began = _now()
        try:
            yield
        finally:
            self.started += _now() - began
