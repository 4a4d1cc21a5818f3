"""Statements of the package, by room, without docstrings: `python tools/count_statements.py`.

A statement counts once however many lines it has, so that formatting changes nothing. With a folder
as argument, those of the package there.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def statements(source: str) -> int:
    """How many statements `source` has that are no text by itself."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(not _is_text(node) for node in found)


def _is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def counted(root: Path) -> Counter[str]:
    """Statements by room; files of the root of the package are `.`."""
    found: Counter[str] = Counter()
    package = root / "autopar"
    for path in package.rglob("*.py"):
        first, *rest = path.relative_to(package).parts
        found[first if rest else "."] += statements(path.read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> None:
    """Print them."""
    found = counted(Path(arguments[0]) if arguments else ROOT)
    for room, number in sorted(found.items()):
        print(f"{room:12} {number:7,}")
    print(f"{'all':12} {found.total():7,}")


if __name__ == "__main__":
    main(sys.argv[1:])
