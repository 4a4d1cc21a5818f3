"""Pages from templates, which escape all there is.

A page forbids itself to load anything and to run any script but its own, whose hash it states.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from autopar.ir.units import format_bytes, format_count, format_ns, format_percent
from autopar.report.names import MAX_NAME, clean, escape

MAX_TEXT = 5 * MAX_NAME
"""Characters of a sentence with names in it."""


def rendered(template: str, script_file: str, **content: Any) -> str:
    """The text of the page of a template in this package, with the style of all pages and a script,
    if `script_file` is not empty."""
    style, script = _text("page.css"), _text(script_file) if script_file else ""
    return (
        _environment()
        .get_template(template)
        .render(
            **content,
            script=Markup(script),
            style=Markup(style),
            script_hash=_hash(script),
            style_hash=_hash(style),
        )
    )


@cache
def _text(name: str) -> str:
    return (files("autopar.report.html") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_shown,
    )
    filters: dict[str, Callable[..., str]] = {
        "time": format_ns,
        "bytes": format_bytes,
        "percent": format_percent,
        "count": format_count,
        "name": clean,
    }
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return environment


def _shown(value: Any) -> Any:
    """Text without what is not printable, and of a length that a page can hold."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape(value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…")
    return value
