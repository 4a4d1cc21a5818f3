"""Pictures as SVG inside a page: elements, and the sizes of texts.

All that is put into an element is escaped, so no name of a file becomes markup. Colours and fonts
are classes of the page's style sheet, which knows of light, dark and print.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log10

from markupsafe import Markup, escape

from autopar.report.names import clean

NOTHING = Markup("")
WIDE = 0x1100
"""Characters from here on are as wide as they are high, or nearly."""


def element(tag: str, *children: Markup | str, **attributes: str | float) -> Markup:
    """An element. Names of attributes are in Python's spelling: `class_`, `text_anchor`."""
    shown = "".join(
        f' {name.strip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{shown}>{''.join(map(escape, children))}</{tag}>")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return str(escape(value))
    return f"{value:.2f}".rstrip("0").rstrip(".")


def picture(width: float, height: float, title: str, children: Iterable[Markup]) -> Markup:
    """A whole picture, `title` for those who do not see it. It is as wide as its place."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=clean(title),
    )


def rect(
    x: float, y: float, width: float, height: float, class_: str, tip: str = "", radius: float = 2
) -> Markup:
    """A rectangle; `tip` is shown under the pointer."""
    return element(
        "rect",
        title(tip),
        x=x,
        y=y,
        width=max(width, 0.5),
        height=height,
        rx=min(radius, width / 2),
        class_=class_,
    )


def title(tip: str) -> Markup:
    """What a browser shows of an element under the pointer."""
    return element("title", "\n".join(map(clean, tip.split("\n")))) if tip else NOTHING


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Markup:
    """A line of text whose base line starts, ends or has its middle at (x, y)."""
    return element("text", clean(words), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x: float, y: float, to_x: float, to_y: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x, y1=y, x2=to_x, y2=to_y, class_=class_)


def svg_path(d: str, class_: str, tip: str = "") -> Markup:
    """A path; `d` in the notation of SVG."""
    return element("path", title(tip), d=d, class_=class_)


def points(where: Iterable[tuple[float, float]]) -> str:
    """Points as `svg_path` takes them, without a letter."""
    return " ".join(f"{_value(x)} {_value(y)}" for x, y in where)


def text_width(words: str, size: float) -> float:
    """The most units that a text takes in a font of `size`. Fonts differ, and the page takes what
    is there: the figures are those of a wide one (DejaVu Sans)."""
    return size * sum(map(_character_width, clean(words)))


def _character_width(character: str) -> float:
    if ord(character) >= WIDE:
        return 1.05
    if character in " .,:;'|!()[]-ijlrtfI":
        return 0.42
    return 1.0 if character in "mwMW%@…→" else 0.78 if character.isupper() else 0.645


def cut(words: str, size: float, width: float) -> str:
    """The text, or as much of it as fits into `width`; empty if that says nothing."""
    words = clean(words)
    if text_width(words, size) <= width:
        return words
    while words and text_width(words, size) + size > width:
        words = words[:-1]
    return f"{words.rstrip()}…" if len(words) > 2 else ""


def first_that_fits(choices: Iterable[str], size: float, width: float) -> str:
    """The first of the texts that fits into `width`; empty if none does."""
    return next((words for words in choices if text_width(words, size) <= width), "")


def ticks(end: float, about: int = 8) -> list[float]:
    """Round numbers from 0 up to `end`, about so many."""
    if end <= 0:
        return [0.0]
    raw = end / about
    power = 10.0 ** int(log10(raw)) if raw >= 1 else 10.0 ** (int(log10(raw)) - 1)
    step = next(m * power for m in (1, 2, 5, 10, 20) if m * power >= raw)
    return [k * step for k in range(int(end / step) + 1)]
