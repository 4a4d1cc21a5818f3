"""What came of a scenario: a value, and a file of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec

CHOSEN = "autopar"


class Entry(msgspec.Struct, frozen=True):
    """One way to train: the milliseconds of its steps by round, and what was planned and predicted
    where autopar did."""

    name: str
    step_ms: list[float]
    predicted_ms: float | None = None
    plan: str = ""

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)


class Outcome(msgspec.Struct, frozen=True):
    """Of `scenario`: `entries` by way, `alike` the ways whose plan is another's, `left_out` those
    that could not be, with the reason; `loss_error` is how far losses of the first steps are apart,
    relative."""

    scenario: str
    entries: list[Entry]
    alike: dict[str, str]
    left_out: dict[str, str]
    loss_error: float

    def entry(self, name: str) -> Entry:
        """That of a way, or of the one that is like it. KeyError if it could not be."""
        by_name = {entry.name: entry for entry in self.entries}
        return by_name[self.alike.get(name, name)]


def load(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file by scenario; none if there is no file."""
    if not path.exists():
        return {}
    found = msgspec.json.decode(path.read_bytes(), type=list[Outcome])
    return {outcome.scenario: outcome for outcome in found}


def save(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write the file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(outcomes)), indent=1) + b"\n")
