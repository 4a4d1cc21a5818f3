"""What `tools/check_prose.py` takes for prose, and what it refuses."""

from __future__ import annotations

import click
import pytest

from tools.check_prose import (
    MAX_WORDS,
    SAY_INSTEAD,
    complaints,
    sentences,
    sentences_of_help,
)

PAGE = """# A title of a page is no sentence

One sentence. A second one, with `a.b. c d` and
a [link](docs/a.md#b.c), on
two lines. Is `it` "quoted." Yes.

- an item
- 1.5 times, e.g. another
  item

```
code. More code.
```

    indented code

| a | table |

<!-- a table -->
Written by a program.
<!-- end of a table -->
"""


def test_what_is_a_sentence() -> None:
    assert [(each.place, each.text, each.num_words) for each in sentences("p.md", PAGE)] == [
        ("p.md:3", "One sentence.", 2),
        ("p.md:3", "A second one, with `a.b. c d` and a [link], on two lines.", 11),
        ("p.md:5", 'Is `it` "quoted."', 3),
        ("p.md:5", "Yes.", 1),
        ("p.md:7", "an item", 2),
        ("p.md:8", "1.5 times, e.g. another item", 5),
    ]


def test_a_long_sentence_is_refused() -> None:
    words = "word " * MAX_WORDS
    page = f"Short.\n\n{words}`code of several words` - {words}\n{words}\n"
    assert not complaints(list(sentences("p.md", words)))
    (complaint,) = complaints(list(sentences("p.md", page)))
    assert complaint.startswith(f"p.md:3: {3 * MAX_WORDS + 1} words, {MAX_WORDS} are allowed: word")


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("Ops that backward makes again.", "makes again"),
        ("It happens in every\nturn.", "every turn"),
        ("Parameters that are kept whole for backward.", "kept whole for backward"),
        ("Ranks are handed the batch.", "are handed"),
        ("It takes longer than it was thought to.", "thought"),
        ("Pieces of a tensor.", "Pieces"),
        ("It used to be so.", "used to"),
    ],
)
def test_a_phrase_is_refused_by_its_name(text: str, phrase: str) -> None:
    (complaint,) = complaints(list(sentences("p.md", text)))
    assert complaint.startswith(f"p.md:1: {phrase!r}: say ")
    assert any(complaint.endswith(f"say {say!r}") for say in SAY_INSTEAD.values())


def test_code_may_have_any_word() -> None:
    assert not complaints(list(sentences("p.md", "See `made again` and `turns`.\n\n    pieces\n")))


def test_help_of_commands_is_prose_too() -> None:
    @click.group(help="All of it.")
    def group() -> None:
        """Its help is above."""

    @group.command(help="One.\n\nAnother.")
    @click.option("--long", "-l", help="word " * (MAX_WORDS + 1))
    def one(long: str) -> None:
        del long

    found = list(sentences_of_help(group, "tool"))
    assert [each.text for each in found if each.place.startswith("tool one")][:2] == [
        "One.",
        "Another.",
    ]
    (complaint,) = complaints(found)
    assert complaint.startswith(f"tool one --long: {MAX_WORDS + 1} words")
