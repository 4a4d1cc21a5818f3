"""Ops on tensors in shards give what they give on whole tensors, or are refused by name."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.edge.process import STATES
from tests.edge.samples import KINDS, cases, tried_ops
from tests.edge.table import (
    FEW,
    FILE,
    PAGE,
    ROOT,
    WORLDS,
    Row,
    Rows,
    add,
    common,
    page_of,
    recorded,
    text_of,
    totals,
    tried,
)
from tests.edge.torch_private import full_name

PARTS = 24
AT_LEAST = 0.95
REFUSED = STATES.index("refused")

processes = pytest.mark.processes


def part_of_the_day() -> int:
    """By commit, as the slices of the nightly tests."""
    run = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(run.stdout or 0) % PARTS


def check(world: int, numbers: range, most: int | None) -> None:
    """No row is worse than the table has it, and none is missing; of each op `most` samples."""
    rows = tried(world, numbers, most)
    known = recorded()
    worse = {
        key: row
        for key, row in rows.items()
        if STATES.index(row.state) > STATES.index(known.get(key, "exact"))
    }
    assert not worse
    ops = tried_ops()
    places = {(each.op, each.place) for number in numbers for each in cases(ops[number], most)}
    assert rows.keys() == places


@processes
@pytest.mark.timeout(300)
def test_a_part_is_as_the_table_has_it() -> None:
    numbers = range(part_of_the_day(), len(tried_ops()), PARTS)
    check(2, numbers, FEW)


@pytest.mark.nightly
@processes
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_is_as_the_table_has_it(world: int, part: int) -> None:
    # Three processes take twice as long as two: they try a few samples of each op.
    numbers = range(part, len(tried_ops()), PARTS)
    check(world, numbers, None if world == 2 else FEW)


def test_nothing_is_other_and_nearly_all_is_exact() -> None:
    states = recorded()
    assert {STATES.index(state) for state in states.values()} == {REFUSED}
    head = FILE.read_text(encoding="utf-8").splitlines()[0]
    rows, share = int(head.split()[0]), float(head.rpartition("%")[0].split()[-1]) / 100
    assert rows > 1000 and len(states) / rows == pytest.approx(1 - share, abs=0.001)
    assert share >= AT_LEAST


def test_what_scripts_use_most_is_exact_in_all_places() -> None:
    names, there = common(), {full_name(op) for op in tried_ops()}
    assert len(set(names)) >= 150 and set(names) <= there
    assert not {op for op, _ in recorded()} & set(names)


def test_the_page_lists_what_is_refused() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for op, place in recorded():
        assert f"`{op}` (" in page and place in page


def test_a_row_is_the_worst_of_its_cases() -> None:
    rows: Rows = {}
    lines: list[tuple[Any, ...]] = [
        (0, "mul", "0", "exact", ""), (0, "mul", "0", "refused", "first"),
        (0, "mul", "0", "refused", "second"), (0, "mul", "1", "exact", ""),
    ]  # fmt: skip
    add(rows, lines)
    assert rows == {("mul", "0"): Row("refused", "first"), ("mul", "1"): Row("exact", "")}
    assert totals(rows)[0] == "2 rows of 1 ops, 50.0% exact"
    assert text_of(rows).splitlines()[-1] == "mul(0): refused"
    assert "| 2 | 1 (50.0%) | 1 | 0 |" in page_of(rows) and "`mul` (0)." in page_of(rows)


def test_every_kind_is_tried_in_every_place() -> None:
    op = next(op for op in tried_ops() if full_name(op) == "addmm")
    found = list(cases(op, 1))
    assert {case.place for case in found} == {"0", "1", "2", "all"}
    assert {case.kind for case in found} == set(KINDS)
    assert {case.form for case in found} == {"function", "in place", "out", "beside out"}
