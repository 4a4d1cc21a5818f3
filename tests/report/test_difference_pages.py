"""Pages of differences: names that others made up are text in them, and they fit in a comment."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from markdown_it import MarkdownIt

from autopar.report.difference import compare
from autopar.report.printed import MAX_CHARACTERS, fitted, plain
from autopar.report.verdict import judge, markdown
from tests.redone import redecided, repriced
from tests.report.plans import renamed, two_axis_plan

replace = msgspec.structs.replace
OLD = two_axis_plan()
UP = OLD.structure.params["model.layers.0.mlp.up.weight"]


class Tags(HTMLParser):
    """The tags of a page, and what is written in `code`."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.is_code = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert not attrs or tag == "td" or tag == "th", (tag, attrs)
        self.is_code = tag == "code"
        self.code += [""] * self.is_code

    def handle_endtag(self, tag: str) -> None:
        self.is_code = False

    def handle_data(self, data: str) -> None:
        if self.is_code:
            self.code[-1] += data


HOSTILE = [
    "<script>alert(1)</script>", "`*x*` | a_b_c ](http://e.org) ![i](j)", "@user #1 :smile: $x$",
    "--> </details> <!-- x", "_x_ __y__", "~~a~~ \\| b", "www.example.org https://e.org a@b.org",
    "&lt;b&gt;",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_in_markdown(name: str) -> None:
    text = markdown(judge(compare(OLD, renamed(OLD, name))), name)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    seen = Tags()
    seen.feed(html)
    allowed = {"p", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    assert seen.tags <= allowed | {"code", "ul", "li", "em"}
    assert name in seen.code
    # GitHub makes links of these in text, but for what is in code.
    assert not [sign for sign in ("@", "#", "://", "www.") if sign in outside(html)]


def outside(html: str) -> str:
    html = re.sub("<!--.*?-->", "", html)
    return "".join(piece.rpartition("</code>")[2] for piece in html.split("<code>"))


@pytest.mark.parametrize("name", [*HOSTILE, "\x1b[31m", "\u202e"])
def test_names_are_text_in_a_terminal(name: str) -> None:
    shown = plain(judge(compare(OLD, renamed(OLD, name))).page(), width=300)
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_markdown_has_the_verdict_first_and_fits() -> None:
    params = {f"module_{'x' * 150}_{i}.weight": UP for i in range(2000)}
    shapes = {name: replace(p, shape=(7, 7)) for name, p in params.items()}
    moved = {
        name: replace(p, storage="[R, R]", for_backward="[R, R]")
        for name, p in (shapes | {"a": UP}).items()
    }
    old, new = (replace(OLD, structure=redecided(OLD.structure, params=p)) for p in (params, moved))
    lines = markdown(judge(compare(old, new)), "plans/x").splitlines()
    assert lines[0] == "<!-- autopar-diff:v1:plans/x -->"
    assert lines[2] == (
        "**The plan changed**: step 31 ms, peak 40 MiB of 50 MiB (80 %), "
        "exposed communication 19.4 %"
    )
    assert len("\n".join(lines)) <= MAX_CHARACTERS
    assert any("1970 more" in line for line in lines)


def test_sections_that_do_not_fit_are_counted() -> None:
    parts = ["head", "x" * (MAX_CHARACTERS - 250), "y" * 100, "z"]
    text = fitted(parts)
    assert len(text) <= MAX_CHARACTERS
    assert ("y" in text, "z" in text) == (False, True)
    assert text.endswith("*Sections left out, too long for a comment: 1 (--json lists all).*\n")


def test_a_plan_tells_how_another_differs() -> None:
    old = two_axis_plan()
    slower = msgspec.structs.replace(
        old, estimates=repriced(old.estimates, step_ns=old.estimates.step_ns * 2)
    )
    found = old.diff(slower)
    assert found == judge(compare(old, slower))
    assert (found.status, old.diff(slower, "memory=1%").status, old.diff(old).status) == (2, 0, 0)
    assert str(found) == plain(found.page())
