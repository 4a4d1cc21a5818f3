"""Fail when prose has a sentence of more than 30 words, or a phrase that is not the field's.

Prose is what stands in README.md, in docs/*.md and in the help of every command, without code
blocks, tables, headings and the targets of links. `--longest 10` prints the longest sentences too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

MAX_WORDS = 30

SAY_INSTEAD = {
    r"(?:made|make|makes|making|computed) again|again for backward": "recomputed",
    r"in turns|(?:every|each|last|first|one|of|the|all|as many) turns?": "microbatch",
    r"kept (?:\w+ )?for backward": "unsharded for backward, or saved",
    r"(?:is|are|be|was) handed": "passed, gets",
    r"thought": "estimated",
    r"worked on": "computed, split",
    r"leanest": "smallest-memory",
    r"newcomers?": "added parameter",
    r"bills?": "cost breakdown",
    r"(?:is|are|was|were|and) played": "simulated",
    r"calls? the roll|the roll": "rank registry",
    r"(?:a|the) meeting|ranks meet": "pre-step check",
    r"(?:segment|fastest|shortest) ways": "paths, segment plans",
    r"pieces?": "shard",
    r"promising": "candidate",
    r"makes? least of": "minimizes",
    r"says? so|said so|as is said": "what it says",
    r"(?:is|are) told": "reported, determined",
    r"nobody (?:asks|asked|says|said)": "by default",
    r"used to|no longer|any longer|before that version": "what is, without history",
}
"""Phrases that stop a reader of the field, as regular expressions, and what to say instead."""

REFUSED = re.compile(
    "|".join(rf"(?P<p{i}>\b(?:{each})\b)" for i, each in enumerate(SAY_INSTEAD)), re.IGNORECASE
)
NOT_PROSE = re.compile(r"\s*(?:[|#<]|!\[|\[\w+\]: )")
WRITTEN_BY_A_PROGRAM = re.compile(
    r"^<!-- (.+) -->$.*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE
)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)[\"')*_]*\s+")


@dataclass(frozen=True, slots=True)
class Sentence:
    """`place` is where it begins: file and line, or a command and its option. In `words` each span
    of code is one word."""

    place: str
    text: str
    words: str

    @property
    def num_words(self) -> int:
        """Those with a letter or a digit."""
        return sum(any(map(str.isalnum, word)) for word in self.words.split())

    def refused(self) -> Iterator[tuple[str, str]]:
        """Phrases of `SAY_INSTEAD` in it, each with what to say instead."""
        for match in REFUSED.finditer(self.words):
            index = int((match.lastgroup or "p0")[1:])
            yield match.group(), list(SAY_INSTEAD.values())[index]


def sentences(place: str, text: str) -> Iterator[Sentence]:
    """Those of a page in Markdown, in order. `place` is the name of its file."""
    for line, paragraph in _paragraphs(text):
        yield from _split(place, line, paragraph)


def sentences_of_help(command: click.Command, name: str) -> Iterator[Sentence]:
    """Those of a command, of its options and of the commands below it, which is called `name`."""
    context = click.Context(command, info_name=name)
    yield from _help(name, command.help)
    for param in command.get_params(context):
        yield from _help(f"{name} {param.opts[0]}", getattr(param, "help", None))
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            if found := command.get_command(context, below):
                yield from sentences_of_help(found, f"{name} {below}")


def complaints(found: list[Sentence]) -> list[str]:
    """What is wrong with them, each in a line."""
    told: list[str] = []
    for each in found:
        if each.num_words > MAX_WORDS:
            told.append(
                f"{each.place}: {each.num_words} words, {MAX_WORDS} are allowed: {each.text}"
            )
        told += [f"{each.place}: {phrase!r}: say {say!r}" for phrase, say in each.refused()]
    return told


def _help(place: str, text: str | None) -> Iterator[Sentence]:
    for _, paragraph in _paragraphs((text or "").replace("\b", "")):
        yield from (replace(each, place=place) for each in _split("", 0, paragraph))


def _paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Paragraphs and items of lists, with the number of their first line."""
    text = WRITTEN_BY_A_PROGRAM.sub(lambda match: "\n" * match.group().count("\n"), text)
    first, lines, is_code = 0, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_indented = not lines and line.startswith("    ")
        is_prose = not (
            is_code or is_fence or is_indented or not line.strip() or NOT_PROSE.match(line)
        )
        if lines and (not is_prose or ITEM.match(line)):
            yield first, lines
            lines = []
        if is_prose:
            first = first if lines else number
            lines.append(ITEM.sub("", line))


def _split(page: str, first: int, lines: list[str]) -> Iterator[Sentence]:
    """Sentences of a paragraph that begins in the line `first`."""
    codes: list[str] = []

    def hide(match: re.Match[str]) -> str:
        codes.append(match.group())
        return f"`{len(codes) - 1}`" + "\n" * match.group().count("\n")

    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    text = re.sub(r"(`+).+?\1", hide, text, flags=re.DOTALL)
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        if words := " ".join(text[start:end].split()):
            shown = re.sub(r"`(\d+)`", lambda match: codes[int(match[1])], words)
            place = f"{page}:{first + text.count(chr(10), 0, start)}"
            yield Sentence(place, " ".join(shown.split()), words)
        start = end


def main() -> int:
    """Print the longest sentences, if asked, and the complaints; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="Print the N longest.")
    longest = parser.parse_args().longest
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    from autopar.cli.main import main as autopar

    found: list[Sentence] = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        page = path.relative_to(root).as_posix()
        found += sentences(page, path.read_text(encoding="utf-8"))
    found += sentences_of_help(autopar, "autopar")
    for each in sorted(found, key=lambda each: -each.num_words)[:longest]:
        print(f"{each.place}: {each.num_words} words: {each.text}")
    wrong = complaints(found)
    for complaint in wrong:
        print(complaint)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
