"""Fail when a name or a label of the package has a word that autopar alone would understand.

What counts is the name of a module, class, function, method, parameter, field or variable, word by
word (`num_again` has `again`). Plan files and pages take theirs from such names. Labels are what
the commands and pages print: strings in `cli` and `report` that are no docstrings, and templates,
style sheets and scripts of pages as a whole, names of classes included.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SAY = {
    "again": "recompute",
    "asked": "the noun it is: request, options",
    "away": "offloaded",
    "bill": "cost breakdown",
    "climb": "line search",
    "fitting": "memory refinement",
    "found": "the noun it is: plan, candidate, result",
    "handed": "input sharding, or saved for backward",
    "homes": "stage assignment",
    "hosted": "on the host",
    "kept": "for backward, unsharded",
    "leanest": "smallest memory",
    "lookup": "embedding",
    "made": "the noun it is: output, result",
    "mail": "messages",
    "meeting": "pre-step check",
    "moment": "peak candidate",
    "moments": "peak candidates",
    "newcomers": "added parameters",
    "parcel": "shard piece",
    "parcels": "shard pieces",
    "passage": "send plan",
    "piece": "shard",
    "pieces": "shards",
    "played": "simulated",
    "product": "matmul",
    "products": "matmuls",
    "promising": "candidates",
    "remade": "recreated",
    "roll": "rank registry",
    "said": "the noun it is: message, text",
    "settling": "resolve",
    "sorts": "segment kinds",
    "spots": "stack location",
    "thought": "estimated",
    "told": "the noun it is: message, text",
    "turn": "microbatch",
    "turns": "microbatches",
    "wanted": "the noun it is: target, placement",
    "ways": "paths, number of parts",
}
"""What to say instead of a word."""

PLAIN = {
    "ShardPiece": "a part of a shard",
    "shard_pieces": "parts of shards",
    "embedding_lookup": "says itself what is looked up",
    "_in_turn": "one after the other",
    "in_one_piece": "not in several",
    "_moments": "mean and variance",
    "kept": "what is not left out, in the solver and of blocks",
}
"""Names in which such a word means something else, and what."""

ROOMS_OF_LABELS = ("cli", "report")
PAGES = (".css", ".j2", ".js")
"""What pages are made of that is no Python."""

PLAIN_LABELS = re.compile(r"\bplan(?:s|ned) again\b|\b(?:plan|solution was|was) found\b")
"""What is plain English in labels: once more, and what a search comes to."""

_COMMENT = re.compile(r"\{#.*?#\}|/\*.*?\*/", re.DOTALL)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def names_of(tree: ast.AST) -> Iterator[str]:
    """The classes, functions, parameters, fields and variables of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.arg(name) | ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case _:
                pass


def labels_of(path: Path) -> Iterator[str]:
    """The labels in a file: strings but for docstrings, or all lines if it is no Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in PAGES:
        yield from map(str.strip, _COMMENT.sub("", text).splitlines())
        return
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(label)) if id(node) not in docstrings:
                yield label
            case _:
                pass


def foreign_words(root: Path) -> list[str]:
    """`file: name: what to say` for each name or label of the package that has such a word."""
    package = root / "autopar"
    found: list[tuple[Path, str, str]] = []
    for path in sorted(package.rglob("*.py")):
        names = {path.stem, *names_of(ast.parse(path.read_text(encoding="utf-8")))}
        found += [(path, name, name) for name in sorted(names - PLAIN.keys())]
    for room in ROOMS_OF_LABELS:
        for path in sorted(package.joinpath(room).rglob("*")):
            if path.suffix in (".py", *PAGES):
                labels = dict.fromkeys(labels_of(path))
                found += [(path, repr(label), PLAIN_LABELS.sub("", label)) for label in labels]
    complaints: list[str] = []
    for path, shown, text in found:
        words = [word.lower() for word in _WORDS.findall(text)]
        say = [f"{word} is {SAY[word]}" for word in words if word in SAY]
        if say:
            complaints.append(f"{path.relative_to(root).as_posix()}: {shown}: {', '.join(say)}")
    return complaints


def main() -> int:
    """Print the complaints; 1 if there are any."""
    complaints = foreign_words(Path(__file__).resolve().parents[1])
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
