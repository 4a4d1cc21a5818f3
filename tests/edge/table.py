"""What ops make of tensors in shards, as a table: `make edge-table`.

Every case of the database runs on two processes over gloo, and some on three. A row is an op and a
place; its state is the worst of its cases. `edge_table.txt` holds the totals and each row that is
not exact, docs/training.md the totals: both are written, and it is an error if they were other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.edge.process import STATES, STOPPED
from tests.edge.samples import tried_ops

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("edge_table.txt")
COMMON = Path(__file__).with_name("common.txt")
PAGE = ROOT / "docs/training.md"
WORLDS = (2, 3)
FEW = 2
"""Samples of each op that three processes try, which take much longer than two."""
BEGIN, END = "<!-- edge table -->", "<!-- end of edge table -->"


class Row(NamedTuple):
    """An op and a place: the worst that came of its cases, and the first case it came of."""

    state: str
    why: str


Rows = dict[tuple[str, str], Row]


def tried(world: int, numbers: range, most: int | None = None) -> Rows:
    """The rows of these ops of the database, on so many processes. An op that ends in a hang has
    that row, and the rest is tried by new processes."""
    rows: Rows = {}
    while numbers:
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / f"{rank}.jsonl" for rank in range(world)]
            _run(world, numbers, most, logs)
            lines = [
                json.loads(line)
                for log in logs
                if log.exists()
                for line in log.read_text(encoding="utf-8").splitlines()
            ]
        add(rows, (line for line in lines if line[3] != "done"))
        done = Counter(line[0] for line in lines if line[3] == "done")
        left = [number for number in numbers if done[number] < world]
        numbers = numbers[numbers.index(left[0]) + 1 :] if left else range(0)
    return rows


def add(rows: Rows, lines: Iterable[Sequence[Any]]) -> None:
    """Take lines of processes into the rows."""
    for _, op, place, state, why in lines:
        known = rows.get((op, place))
        if known is None or STATES.index(state) > STATES.index(known.state):
            rows[op, place] = Row(state, why)


def _run(world: int, numbers: range, most: int | None, logs: Sequence[Path]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    what = [str(numbers.start), str(numbers.stop), str(numbers.step)]
    what += [] if most is None else ["--most", str(most)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.edge.process", str(log), *what],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",  # the database takes some samples from sets of texts
            },
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    told = [rank.communicate()[1] for rank in ranks]
    for rank, text in zip(ranks, told, strict=True):
        if rank.returncode not in (0, STOPPED):
            raise RuntimeError(f"a rank ended with {rank.returncode}:\n{text[-3000:]}")


def text_of(rows: Mapping[tuple[str, str], Row]) -> str:
    """Totals, then a line for each row that is not exact."""
    lines = [*totals(rows), ""]
    for (op, place), row in sorted(rows.items()):
        if row.state != "exact":
            lines.append(f"{op}({place}): {row.state}")
    return "\n".join(lines) + "\n"


def totals(rows: Mapping[tuple[str, str], Row]) -> list[str]:
    """How many rows are in which state."""
    counted = Counter(row.state for row in rows.values())
    share = counted["exact"] / max(1, len(rows))
    ops = len({op for op, _ in rows})
    lines = [f"{len(rows)} rows of {ops} ops, {share:.1%} exact"]
    return lines + [f"{state}: {counted[state]}" for state in STATES]


def recorded() -> dict[tuple[str, str], str]:
    """The state of each row that is not exact, from the file."""
    lines = FILE.read_text(encoding="utf-8").partition("\n\n")[2].splitlines()
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        name, _, state = line.rpartition(": ")
        op, _, place = name.removesuffix(")").rpartition("(")
        found[op, place] = state
    return found


def common() -> list[str]:
    """The ops that scripts use most."""
    return COMMON.read_text(encoding="utf-8").split()


def page_of(rows: Mapping[tuple[str, str], Row]) -> str:
    """The part of docs/training.md."""
    counted = Counter(row.state for row in rows.values())
    refused: dict[str, list[str]] = {}
    for (op, place), row in sorted(rows.items()):
        if row.state == "refused":
            refused.setdefault(op, []).append(place)
    listed = ", ".join(f"`{op}` ({', '.join(places)})" for op, places in refused.items())
    share = counted["exact"] / max(1, len(rows))
    return (
        f"| ops and places | exact | refused by name | other |\n| ---: | ---: | ---: | ---: |\n"
        f"| {len(rows)} | {counted['exact']} ({share:.1%}) | {counted['refused']} "
        f"| {len(rows) - counted['exact'] - counted['refused']} |\n\n"
        f"Refused in some form: {listed}.\n"
    )


def write(rows: Mapping[tuple[str, str], Row]) -> list[str]:
    """Write both files; gives the names of those that were other before."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    made = {FILE: text_of(rows), PAGE: f"{head}{BEGIN}\n{page_of(rows)}{END}{tail}"}
    changed: list[str] = []
    for path, text in made.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed.append(str(path.relative_to(ROOT)))
            path.write_text(text, encoding="utf-8")
    return changed


def main() -> int:
    """Try all, write the files, and tell what changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, help="so many samples of each op, and write nothing")
    parser.add_argument("--only", default="", help="ops whose names begin so, and write nothing")
    parser.add_argument("--worlds", default="2,3")
    given: Any = parser.parse_args()
    names = [op.name for op in tried_ops()]
    chosen = [k for k, name in enumerate(names) if name.startswith(given.only)]
    rows: Rows = {}
    for world in map(int, given.worlds.split(",")):
        for first in range(chosen[0], chosen[-1] + 1, 50):
            part = range(first, min(first + 50, chosen[-1] + 1))
            found = tried(world, part, given.most or (None if world == 2 else FEW))
            add(rows, ((0, *key, *row) for key, row in found.items()))
            print(f"{world} processes: {part.stop} of {len(names)} ops", flush=True)
            for (op, place), row in sorted(found.items()):
                if row.state != "exact":
                    print(f"  {op}({place}) {row.state}: {row.why[:300]}", flush=True)
    print("\n".join(totals(rows)))
    if given.most is not None or given.only:
        return 0
    changed = write(rows)
    print("\n".join(f"{name} was other" for name in changed))
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
