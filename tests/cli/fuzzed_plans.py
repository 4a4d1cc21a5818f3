"""Runs commands on damaged plan files, and watches what the interpreter does meanwhile.

    python -m tests.cli.fuzzed_plans COUNT FOLDER

Half of the files are damaged as bytes; half as content, which is then written as autopar would have
written it, so that what checks the content is what meets it.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.ir.files import written
from autopar.plans.plan import pack
from tests.report.plans import renamed, stepped_plan

FORBIDDEN = ("exec", "compile", "import", "subprocess.", "os.system", "os.exec", "os.fork",
             "os.posix_spawn", "socket.", "pickle.", "marshal.", "ctypes.", "shutil.")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**62, 2**63, 10**400, 1.5, "", "x", "R", "[R, R]", "[S(9), P]", "a.0.b",
    "{0-3}", "layers.{0-199999}.{0-9}", "<script>alert(1)</script>", "\x1b[31m", "../../etc/passwd",
    "__import__('os').system('x')", "é" * 300, "[]", [], {}, [[]], ["x"] * 50, {"": ""},
    {"x": {"x": {}}}, [1, 2, 3], "optimizer", "dp", "mm@forward", "0: int64[8, 128]",
)  # fmt: skip


def places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in `content`."""
    entries = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in entries:
        yield (*above, key)
        yield from places(value, (*above, key))


def damaged_content(content: Any, rng: random.Random) -> Any:
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        *way, key = rng.choice(list(places(content)))
        holder = content
        for step in way:
            holder = holder[step]
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[str(rng.choice(VALUES))] = holder.pop(key)
        elif kind == 2 and isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice((1, 3, 1000))
        elif kind == 3:
            *other, last = rng.choice(list(places(content)))
            value = content
            for step in (*other, last):
                value = value[step]
            holder[key] = copy.deepcopy(value)
        else:
            alike = [v for v in VALUES if type(v) is type(holder[key])]
            wanted = alike if alike and rng.random() < 0.8 else VALUES
            holder[key] = copy.deepcopy(rng.choice(wanted))
    return content


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, length = rng.randrange(len(data)), rng.choice((1, 1, 2, 30, 400))
        piece = data[place : place + length]
        data = data[:place] + rng.choice(
            (b"", piece + piece, rng.randbytes(length), piece[::-1], b"9" * length, b"{" * length)
        ) + data[place + length :]  # fmt: skip
    return data


def files(count: int, rng: random.Random) -> Iterator[bytes]:
    good = stepped_plan()
    content = pack(msgspec.to_builtins(good))
    for number in range(count):
        if number % 2:
            yield damaged_bytes(good.to_bytes(), rng)
        else:
            try:
                yield written(damaged_content(content, rng), 3, {"stages"})
            except (msgspec.MsgspecError, OverflowError):
                yield good.to_bytes()[:-1]


def commands(path: Path, good: Path) -> tuple[list[str], ...]:
    page, trace = path.with_suffix(".html"), path.with_suffix(".trace")
    return (
        ["show", str(path)],
        ["show", "--json", str(path)],
        ["diff", str(good), str(path)],
        ["diff", "--format", "md", str(path), str(good)],
        ["explain", str(path)],
        ["explain", str(path), "model.layers.*.mlp"],
        ["report", str(path), "-o", str(page), "--trace", str(trace)],
    )


def run(count: int, folder: Path, watched: Watched) -> Counter[str]:
    """How often each command ended in which status; what was no clean end is raised."""
    good, path = folder / "good.json", folder / "plan.json"
    stepped_plan().save(good)
    runner, ends = CliRunner(), Counter[str]()
    # What is imported when it is first needed is there before the watch begins.
    for plan in (stepped_plan(), renamed(stepped_plan(), "\x1b\u200bé漢"), None):
        path.write_bytes(b"{" if plan is None else plan.to_bytes())
        for arguments in commands(path, good):
            assert runner.invoke(main, arguments).exit_code in (0, 1, 2), arguments
    watched.begin()
    for data in files(count, random.Random(5)):
        path.write_bytes(data)
        for arguments in commands(path, good):
            result = runner.invoke(main, arguments)
            ends[f"{arguments[0]} {result.exit_code}"] += 1
            clean = result.exit_code in (0, 1, 2) and "Traceback" not in result.output
            if not clean or "did not expect" in result.output or watched.events:
                (folder / "found.json").write_bytes(data)
                found = f"{result.exit_code}: {result.output[-2000:]}: {watched.events}"
                raise AssertionError(f"{arguments}: {found}")
    return ends


class Watched:
    """What the interpreter does that no plan should make it do. The page's own template is compiled
    for each page: the same code again is nothing new."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._known: set[object] = set()
        self._begun = False
        sys.addaudithook(self._hook)

    def begin(self) -> None:
        self._begun = True

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not event.startswith(FORBIDDEN):
            return
        code = getattr(args[0], "co_code", args[0]) if args else None
        key = event, code if isinstance(code, bytes | str) else repr(code)
        if not self._begun:
            self._known.add(key)
        elif key not in self._known or event not in ("compile", "exec"):
            self.events.append(f"{event} {args!r:.200}")


if __name__ == "__main__":
    for end, number in sorted(run(int(sys.argv[1]), Path(sys.argv[2]), Watched()).items()):
        print(end, number)
