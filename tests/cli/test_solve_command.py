"""`autopar solve`: answers for good files, one clear sentence for bad ones."""

from __future__ import annotations

import gzip
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autopar.cli.main import main
from autopar.solver import contest_files
from autopar.solver.message_passing import path as large
from benchmarks import contest

EXAMPLE = Path(__file__).parents[1] / "solver" / "iopddl_example.json"
HUGE = 10**18


def run(path: Path, *options: str) -> Result:
    result = CliRunner().invoke(main, ["solve", str(path), *options])
    assert "Traceback" not in result.output
    return result


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.fixture
def example() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text())


def write(path: Path, content: object) -> Path:
    file = path / "problem.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_example(tmp_path: Path) -> None:
    packed = tmp_path / "example.json.gz"
    packed.write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    for path in (EXAMPLE, packed):
        *above, last = lines(run(path, "--time-limit", "5"))
        assert last == "[0, 0, 2, 1, 0]"
        assert above == [
            "cost    445",
            "bound   445",
            "gap     0.000 % (optimal)",
            "usage   50 of 50",
        ]


def change(example: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed = deepcopy(example)
    at: Any = changed["problem"]
    *way, last = path.split(".")
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("nodes.costs.1", [55, -1], "node 1 has a cost or usage below 0"),
        ("nodes.costs.1", [55, 1.5], "Expected `int`, got `float` - at `$.problem.nodes.costs[1]"),
        ("nodes.costs.1", [], "node 1 has no choices"),
        ("nodes.costs.1", [55], "node 1 has 1 costs and 2 usages"),
        ("nodes.costs", [], "it has no nodes"),
        ("nodes.usages", [[1]], "costs of 5 nodes, usages of 1 and intervals of 5"),
        ("nodes.usages.0", [-3], "node 0 has a cost or usage below 0"),
        ("nodes.intervals.2", [120, 50], "node 2 has the interval [120, 50)"),
        ("nodes.intervals.2", [50], "of length 2"),
        ("nodes", {"costs": [[1]]}, "missing required field `intervals`"),
        ("edges.nodes.3", [2, 5], "edge 3 names nodes 2 and 5, and there are 5"),
        ("edges.nodes.3", [-1, 2], "edge 3 names nodes -1 and 2"),
        ("edges.costs.2", [1, 2, 3], "edge 2 has 3 costs for 4 pairs of choices"),
        ("edges.costs.2", [1, 2, 3, "x"], "Expected `int`, got `str`"),
        ("edges.costs", [], "5 edges and costs of 0"),
        ("usage_limit", -1, "its usage_limit is -1"),
    ],
)
def test_what_is_no_problem(
    tmp_path: Path, example: dict[str, Any], path: str, value: object, words: str
) -> None:
    result = run(write(tmp_path, change(example, path, value)))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        '{"problem": {"nodes": {"costs": [[1, NaN]]',
        '{"problem": {"name": "\\ud800',
        "[" * 100_000,
        '{"problem": ' * 100_000,
        '{"problem": {"other": ' + "[" * 100_000,
        '{"problem": {"nodes": {"costs": [[' + "9" * 10_000 + "]]}}}",
        "{}",
        "null",
    ],
)
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    result = run(write(tmp_path, text))
    assert result.exit_code == 1
    assert result.stderr.startswith("autopar: error: ")
    assert result.stderr.count("\n") == 1
    assert "did not expect" not in result.stderr


def test_files_that_are_damaged(tmp_path: Path) -> None:
    packed = gzip.compress(EXAMPLE.read_bytes())
    for content in (packed[:-20], packed[:40], packed[:20] + b"xxxx" + packed[24:]):
        path = tmp_path / "damaged.json.gz"
        path.write_bytes(content)
        result = run(path)
        assert result.exit_code == 1
        assert "is a damaged gzip file" in result.stderr
    assert "cannot be read: No such file" in run(tmp_path / "none.json").stderr
    assert "cannot be read: Is a directory" in run(tmp_path).stderr


def test_a_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_files, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 26)))
    result = run(path)
    assert result.exit_code == 1
    assert "holds more than 1 MiB" in result.stderr


def test_a_limit_that_cannot_be_kept(tmp_path: Path, example: dict[str, Any]) -> None:
    result = run(write(tmp_path, change(example, "usage_limit", 49)))
    assert result.exit_code == 3
    assert "need 50 at time 50" in result.stderr


def test_costs_that_are_not_allowed(tmp_path: Path, example: dict[str, Any]) -> None:
    """The largest cost is a wall where another plan exists, and a cost where none does."""
    walled = change(example, "edges.costs.4", [HUGE, 60])
    *above, last = lines(run(write(tmp_path, walled)))
    assert last == "[0, 0, 2, 1, 0]"
    walled = change(walled, "edges.costs.4", [HUGE, HUGE])
    *above, _ = lines(run(write(tmp_path, walled)))
    assert above[0] == f"cost    {HUGE + 385}"
    assert int(above[1].split()[1]) <= HUGE + 385


def test_sums_beyond_64_bits(tmp_path: Path) -> None:
    count = 40
    content = {
        "nodes": {
            "intervals": [[0, 2**70]] * count,
            "costs": [[HUGE + 1, 3 * HUGE]] * count,
            "usages": [[2**62, 2**61]] * count,
        },
        "usage_limit": 2**61 * count + 2**62,
    }
    best = 2 * (HUGE + 1) + (count - 2) * 3 * HUGE
    *above, last = lines(run(write(tmp_path, {"problem": content})))
    assert above[0] == f"cost    {best}"
    assert last.count("0") == 2
    assert int(above[1].split()[1]) <= best


def test_one_second(tmp_path: Path) -> None:
    """A problem that is too big for the time ends with a sentence or an answer, on time."""
    path = write(tmp_path, large_problem(count=600))
    result = run(path, "--time-limit", "1")
    if result.exit_code == 0:
        assert result.stdout.splitlines()[-1].startswith("[")
    else:
        assert result.exit_code == 1
        assert "no solution was found within 1 s" in result.stderr


def large_problem(count: int = 120, choices: int = 10, limit: int = 1500) -> dict[str, Any]:
    """A ladder whose tables are beyond the integer program."""
    sums = [(7 * i + 11 * c) % 101 for i in range(count) for c in range(choices)]
    pairs = [(i, j) for i in range(count) for j in (i + 1, i + 2) if j < count]
    return {
        "problem": {
            "nodes": {
                "intervals": [[i, i + 20] for i in range(count)],
                "costs": [sums[i * choices : (i + 1) * choices] for i in range(count)],
                "usages": [[(choices - c) ** 2 for c in range(choices)] for i in range(count)],
            },
            "edges": {
                "nodes": pairs,
                "costs": [
                    [(a * b * (i + j)) % 53 for a in range(choices) for b in range(choices)]
                    for i, j in pairs
                ],
            },
            "usage_limit": limit,
        }
    }


@pytest.mark.nightly
def test_the_same_answer_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_ROUNDS", 4)
    path = write(tmp_path, large_problem())
    assert lines(run(path)) == lines(run(path))


def test_progress_is_silent_without_a_terminal() -> None:
    assert run(EXAMPLE).stderr == ""


def test_the_log_tells_plans_with_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_ROUNDS", 4)
    result = run(write(tmp_path, large_problem()), "--log")
    assert result.exit_code == 0
    rounds = re.findall(r"^ +\d+\.\d s  round (\d): plan \d+, bound \d+$", result.stderr, re.M)
    assert rounds == ["1", "2", "3", "4"]
    assert result.stdout.splitlines()[0].startswith("cost ")
    cost = result.stdout.split()[1]
    assert contest.early(result.stderr, 1e6) == "1.0000"
    assert contest.early(result.stderr, -1.0) == "no plan"
    assert f"plan {cost}," in result.stderr.splitlines()[-1]
