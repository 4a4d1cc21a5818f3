"""Fail when a Python file is longer than 400 lines: a file holds one idea, and fits a head."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_LINES = 400
FOLDERS = ("autopar", "tests", "benchmarks", "examples", "tools")


def too_long(root: Path) -> list[str]:
    """`path: n lines` for each Python file below `root` that is over the limit, by path."""
    complaints: list[str] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > MAX_LINES:
                complaints.append(f"{path.relative_to(root)}: {num_lines} lines")
    return complaints


def main() -> int:
    """Print the complaints; 1 if there are any."""
    complaints = too_long(Path(__file__).resolve().parents[1])
    for complaint in complaints:
        print(f"{complaint}, {MAX_LINES} are allowed: split it by idea")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
