"""Fail when two files of the package define one public name: a name has one meaning.

What counts is defined at the top of a file: classes, functions, constants and types.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SHORTHANDS = frozenset({"aten", "c10d"})
"""What files call a torch namespace."""

COMMANDS = frozenset({"explain", "plan", "profile", "report", "solve", "verify"})
"""A command of the CLI is called as the function it calls."""


def public_names(source: str) -> Iterator[str]:
    """What a Python file's text defines at its top without an underscore in front."""
    for node in ast.parse(source).body:
        found: list[str] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found = [node.name]
            case ast.Assign():
                found = [each.id for each in node.targets if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name() as target):
                found = [target.id]
            case _:
                pass
        yield from (name for name in found if not name.startswith("_"))


def defined_twice(root: Path) -> list[str]:
    """`name: files` for each public name of the package that several files define, by name."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "autopar").rglob("*.py")):
        where = path.relative_to(root)
        for name in public_names(path.read_text(encoding="utf-8")):
            if name in SHORTHANDS or (name in COMMANDS and where.parts[1] == "cli"):
                continue
            files[name].add(where.as_posix())
    return [
        f"{name}: {', '.join(sorted(where))}"
        for name, where in sorted(files.items())
        if len(where) > 1
    ]


def main() -> int:
    """Print the complaints; 1 if there are any."""
    complaints = defined_twice(Path(__file__).resolve().parents[1])
    for complaint in complaints:
        print(f"{complaint}: rename one, or make it private")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
