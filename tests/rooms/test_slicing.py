"""Slices of tests: together they are all of them, each once, and about as long as each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import slicing
from tests.slicing import Recorded, Slice, breadth, by_package, parse_slice, read_record

SECONDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=60)


@given(seconds=SECONDS, parts=st.integers(1, 30))
def test_each_test_is_in_one_slice(seconds: list[float], parts: int) -> None:
    slices = [Slice(part, parts).of(seconds) for part in range(1, parts + 1)]
    assert [i for part in slices for i in part] == list(range(len(seconds)))


@given(seconds=SECONDS, parts=st.integers(1, 30))
def test_no_slice_is_longer_than_its_share_by_more_than_a_test(
    seconds: list[float], parts: int
) -> None:
    share, longest = sum(seconds) / parts, max(seconds)
    for part in range(1, parts + 1):
        taken = sum(seconds[i] for i in Slice(part, parts).of(seconds))
        assert taken <= share + longest + 1e-6


@pytest.mark.parametrize(
    "text", ["", "3", "0/24", "25/24", "commit", "commit/0", "x/24", "3/x", "-1/3"]
)
def test_what_is_no_slice_is_told(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="write 3/24"):
        parse_slice(text)


def test_a_record_is_read_as_it_was_written() -> None:
    record = {
        "tests/cli/test_diff.py::test_b": Recorded(3, 0.25),
        "tests/cli/test_diff.py::TestA::test_c": Recorded(1, 12.5),
        "tests/cli/test_check.py::test_z": Recorded(2, 1.0),
        "tests/zoo/test_masks.py::test_a": Recorded(10, 0.5),
    }
    text = slicing.write_record(record)
    assert read_record(text) == record
    assert text.count("[") == 2
    assert read_record(slicing.write_record({})) == {}


def test_the_record_is_written_as_it_is_read() -> None:
    text = slicing.RECORD.read_text(encoding="utf-8")
    assert slicing.write_record(read_record(text)) == text


def test_seconds_are_added_up_by_package() -> None:
    seconds = {"tests/cli/test_a.py::b": [1.0, 2.0], "tests/cli/test_c.py::d": [3.0]}
    cli, together = by_package(seconds)
    assert cli.split() == ["tests/cli", "3", "cases", "6.0", "s"]
    assert together.split()[1:] == cli.split()[1:]


@pytest.mark.parametrize("one_in", [1, 0, -2])
def test_breadth_leaves_something_for_the_night(one_in: int) -> None:
    with pytest.raises(ValueError, match="2 or more"):
        breadth(one_in)


def test_breadth_is_marked() -> None:
    class Item:
        def __init__(self, name: str, *args: int) -> None:
            self.nodeid, self.args, self.marks = name, args, []

        def get_closest_marker(self, _: str) -> pytest.Mark | None:
            return pytest.mark.breadth(*self.args).mark if self.args else None

        def add_marker(self, marker: pytest.MarkDecorator) -> None:
            self.marks.append(marker.name)

    items = [Item(f"a.py::x[{i}]", 3) for i in range(5)] + [Item("a.py::y"), Item("a.py::z[0]", 2)]
    slicing.mark_breadth(items)  # type: ignore[arg-type]
    assert [bool(item.marks) for item in items] == [False, True, True, False, True, False, False]


CASES = """
import pytest

@pytest.mark.breadth(4)
@pytest.mark.parametrize("n", range(8))
def test_n(n):
    pass
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_slices_of_the_night_run_and_say_what_they_took(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_it.py").write_text(CASES)
    ini = "[pytest]\nmarkers =\n    breadth\n    nightly\n"
    (tmp_path / "pytest.ini").write_text(ini)
    pytest_here = [sys.executable, "-m", "pytest", "-v", "-p", "tests.slicing", "-n", str(workers)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(slicing.ROOT)
    ran = [
        subprocess.run(
            [*pytest_here, "-m", "nightly", "--slice", f"{part}/2"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for part in (1, 2)
    ]
    for out, cases in zip(ran, ([1, 2, 3], [5, 6, 7]), strict=True):
        assert "together                  3 cases" in out
        assert [n for n in range(8) if f"test_it.py::test_n[{n}] " in out] == cases
