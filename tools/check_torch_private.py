"""Fail when a private torch API is used outside a torch_private.py.

ruff's TID251 bans names one by one; this finds every `torch._x`, `torch.fx._x`, ... by its
underscore, through aliases too. Allowed are the files that `pyproject.toml` exempts from TID251.
`torch.ops._x` is not Python API but an op's name, and is allowed, as are `torch._check` and its
kin, which torch documents for models.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

FOLDERS = ("autopar", "benchmarks", "examples", "tests")


def exempt_files(root: Path) -> tuple[str, ...]:
    """Patterns of the files that ruff's TID251 leaves alone."""
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    ignores: dict[str, list[str]] = config["tool"]["ruff"]["lint"]["per-file-ignores"]
    return tuple(sorted(pattern for pattern, rules in ignores.items() if "TID251" in rules))


def private_part(name: str) -> str | None:
    """`torch.fx._x` of `torch.fx._x.y`; None if nothing private to torch is named."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"] or name.startswith("torch._check"):
        return None
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[: i + 1])
    return None


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, for names that lead into torch."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    target = alias.name if alias.asname else "torch"
                    aliases[alias.asname or "torch"] = target
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.split(".")[0] == "torch":
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
    return aliases


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`a.b.c` of an attribute chain that starts at an alias of torch, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return ""
    return ".".join([aliases[node.id], *reversed(parts)])


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of a private torch API in a Python file's text."""
    tree = ast.parse(source)
    aliases = torch_aliases(tree)
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node, aliases)]
        for name in names:
            private = private_part(name)
            if private is not None:
                found.add((getattr(node, "lineno", 0), private))
    yield from sorted(found)


def main() -> int:
    """Print `file:line: name` for each private use elsewhere; 1 if there is any."""
    root = Path(__file__).resolve().parents[1]
    exempt = exempt_files(root)
    failed = False
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if any(fnmatch(name, pattern) for pattern in exempt):
                continue
            for line, private in private_uses(path.read_text(encoding="utf-8")):
                failed = True
                print(
                    f"{name}:{line}: {private} is private to torch; put it in one of "
                    f"{', '.join(exempt)}"
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
