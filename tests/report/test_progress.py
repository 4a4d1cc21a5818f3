"""What a person sees while autopar works."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading

import pytest
from rich.console import Console

from autopar.plans.provenance import CandidateOutcome, SearchStep
from autopar.report import progress
from autopar.report.progress import TimedLines, shown_progress, step_text

FIRST = CandidateOutcome("mesh dp=8", "planned", 1_300_000_000)
BEST = CandidateOutcome("mesh dp=4,tp=2", "planned", 1_280_000_000)
CUT = CandidateOutcome("mesh tp=8", "not better", 1_290_000_000)
REFUSED = CandidateOutcome("mesh cp=8", "infeasible", reason="it needs 90 GiB")


def test_lines_come_also_while_nothing_is_said() -> None:
    found: list[str] = []
    two = threading.Event()

    def write(line: str) -> None:
        found.append(line)
        if len(found) == 2:
            two.set()

    lines = TimedLines(write, 1e-3)
    lines("solving for mesh dp=8")
    assert two.wait(60)
    lines.close()
    assert set(found) == {"0 s: solving for mesh dp=8"}
    count = len(found)
    lines("later")
    assert len(found) == count


def test_nothing_is_written_before_anything_is_said() -> None:
    found: list[str] = []
    lines = TimedLines(found.append, 1e-4)
    lines.close()
    assert found == []


def test_a_line_has_the_best_plan_so_far() -> None:
    step = SearchStep("solving for mesh tp=8", (FIRST, BEST, CUT, REFUSED))
    assert step == "solving for mesh tp=8"
    assert step.best is BEST
    assert step_text(step) == "solving for mesh tp=8; best so far: mesh dp=4,tp=2, 1.28 s"
    assert step_text(SearchStep("solving\x1b[2J", (CUT,))) == "solving\\x1b[2J"


def test_a_step_of_a_search_is_sent_and_copied_as_its_text() -> None:
    step = SearchStep("solving", (FIRST,))
    for made in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert made == "solving" and type(made) is str


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_process_without_standard_error_says_nothing(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    if stream is not None:
        stream.close()
    with shown_progress() as say:
        say("solving")
    progress.print_line("solving")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_short_work_leaves_nothing(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := stream())
    with shown_progress() as say:
        say("importing the target")
    # On a terminal the table is wiped.
    shown = screen.getvalue()
    assert shown == "" or shown.endswith(("\x1b[2K", "\x1b[?25h"))


def test_the_table_has_the_last_candidates_and_the_best() -> None:
    many = tuple(CandidateOutcome(f"mesh {n}", "not better", 2 * 10**9) for n in range(20))
    table = progress._LiveTable()
    console = Console(file=io.StringIO(), width=100)
    console.print(table())
    table.take(SearchStep("solving for mesh dp=2", (BEST, REFUSED, *many)))
    console = Console(file=(page := io.StringIO()), width=100)
    console.print(table())
    lines = page.getvalue().splitlines()
    assert lines[0].split() == ["mesh", "dp=4,tp=2", "planned,", "1.28", "s"]
    assert [line.split()[1] for line in lines[1:-1]] == [str(n) for n in range(13, 20)]
    assert "solving for mesh dp=2 (0 s)" in lines[-1]
