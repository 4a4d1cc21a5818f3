"""Slices of the tests of about the same length, and what each test takes.

`make nightly SLICE=3/24` runs the third of 24 slices of the nightly tests: a run of tests in the
order in which pytest collects them, since neighbours share models that are made once.

`seconds.toml` has, per package, how many nightly cases each test has and the mean seconds of one,
of a run with two workers; `make nightly RECORD=1` writes what it ran. `python -m tests.slicing`
prints the sums.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from autopar.ir.files import write_atomically

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("seconds.toml")
DEFAULT_S = 1.0
"""Of a case of a test that was never recorded."""

_TAKEN_S = pytest.StashKey[float]()
_CASES = pytest.StashKey[Counter[str]]()
_SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many nightly cases a test has, and the mean seconds of one."""

    cases: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Slice:
    """The `part`-th of so many `parts`, from 1 on."""

    part: int
    parts: int

    def of(self, seconds: Sequence[float]) -> list[int]:
        """Those of tests that take so long whose middle lies in this part of the whole."""
        ends, total = list(accumulate(seconds)), sum(seconds)
        middles = (end - own / 2 for end, own in zip(ends, seconds, strict=True))
        parts = (min(self.parts, 1 + int(self.parts * m / total)) for m in middles)
        return [i for i, part in enumerate(parts) if part == self.part]


def parse_slice(text: str) -> Slice:
    """`3/24`."""
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return Slice(int(part), int(parts))
    raise pytest.UsageError(f"--slice {text}: write 3/24 for the third of 24")


def name_of(nodeid: str) -> str:
    """A test without its parameters: `tests/cli/test_diff.py::test_x`."""
    return nodeid.partition("[")[0]


def package_of(nodeid: str) -> str:
    """The folder of a test."""
    return nodeid.partition("::")[0].rpartition("/")[0]


def read_record(text: str) -> dict[str, Recorded]:
    """What a record holds, by test."""
    return {
        f"{package}/{name}": Recorded(**entry)
        for package, tests in tomllib.loads(text).items()
        for name, entry in tests.items()
    }


def write_record(record: Mapping[str, Recorded]) -> str:
    """A table per package, a line per test, in order of their names."""
    lines: list[str] = []
    for test, known in sorted(record.items(), key=lambda pair: (package_of(pair[0]), pair[0])):
        package = package_of(test)
        if (head := f'["{package}"]') not in lines:
            lines += ["", head]
        name = test.removeprefix(f"{package}/")
        lines.append(f'"{name}" = {{ cases = {known.cases}, seconds = {known.seconds:.2f} }}')
    return "\n".join([*lines[1:], ""])


def by_package(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A line per package: how many cases, and what all of them take."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for test, each in seconds.items():
        found[package_of(test)] += each
    rows = [*sorted(found.items()), ("together", [s for each in found.values() for s in each])]
    return [f"{name:20} {len(each):6} cases {sum(each):9.1f} s" for name, each in rows]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slices")
    group.addoption("--slice", metavar="K/N", help="of N slices of the tests the K-th")
    group.addoption("--record-seconds", action="store_true", help=f"write {RECORD.name}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Before pytest leaves out what `-m` leaves out, tests of breadth get their marks; afterwards
    the slice is cut."""
    mark_breadth(items)
    yield
    config.stash[_CASES] = Counter(name_of(item.nodeid) for item in items)
    given = config.getoption("--slice")
    if given:
        kept = set(parse_slice(given).of(expected_seconds([item.nodeid for item in items])))
        config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i not in kept])
        items[:] = [x for i, x in enumerate(items) if i in kept]


def mark_breadth(items: Sequence[pytest.Item]) -> None:
    """Of a test of `breadth(N)` one case in N is daily, the others are nightly."""
    seen: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("breadth")
        if marker is not None:
            name = name_of(item.nodeid)
            if seen[name] % breadth(*marker.args):
                item.add_marker(pytest.mark.nightly)
            seen[name] += 1


def breadth(one_in: int) -> int:
    """The argument of the marker; ValueError where it would leave nothing for the night."""
    if one_in < 2:
        raise ValueError(f"breadth({one_in}): of so many cases one is daily, so 2 or more")
    return one_in


def expected_seconds(nodeids: Sequence[str]) -> list[float]:
    """Seconds of each, as recorded for its test."""
    known = read_record(RECORD.read_text(encoding="utf-8"))
    unknown = Recorded(0, DEFAULT_S)
    return [known.get(name_of(nodeid), unknown).seconds for nodeid in nodeids]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of what comes last has what all took: it travels to the process that writes."""
    report = yield
    item.stash[_TAKEN_S] = item.stash.get(_TAKEN_S, 0.0) + call.duration
    if call.when == "teardown":
        report.user_properties.append((_SECONDS, item.stash[_TAKEN_S]))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What a worker of xdist has collected, its controller has not."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and _CASES in session.config.stash:
        output["cases"] = dict(session.config.stash[_CASES])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist is done."""
    cases = getattr(node, "workeroutput", {}).get("cases", {})
    node.config.stash[_CASES] = Counter(cases)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Seconds by package, of a slice or to be recorded."""
    if not (config.getoption("--slice") or config.getoption("--record-seconds")):
        return
    seconds = measured(terminalreporter)
    terminalreporter.section("seconds by package")
    for line in by_package(seconds):
        terminalreporter.line(line)
    if config.getoption("--record-seconds"):
        record = read_record(RECORD.read_text(encoding="utf-8"))
        cases = config.stash[_CASES]
        new = {test: Recorded(cases[test], sum(each) / len(each)) for test, each in seconds.items()}
        write_atomically(RECORD, write_record(record | new).encode())


def measured(terminalreporter: pytest.TerminalReporter) -> dict[str, list[float]]:
    """Seconds of each case that ran, by test."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                found[name_of(report.nodeid)].append(dict(report.user_properties)[_SECONDS])
    return found


def recorded_by_package() -> list[str]:
    """What all nightly tests take, as recorded."""
    record = read_record(RECORD.read_text(encoding="utf-8"))
    return by_package({test: [known.seconds] * known.cases for test, known in record.items()})


if __name__ == "__main__":
    print("\n".join(recorded_by_package()))
