"""docs/options.md, made of the options: `python -m tests.options_page` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from autopar.cli.plan import flag_of
from autopar.plans.plan_options import OptionField, PlanOptions, option_fields

PAGE = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Options of a plan

`autopar.compile`, `autopar.plan` and `autopar.frontier` take these as keywords, `autopar plan` as
flags, and a recipe ([gate.md](gate.md)) as keys. A frontier is of one stage. The file of a plan has
them under `provenance.options`, in the groups below, so that `autopar explain` can plan it again.
"""


def page() -> str:
    """The page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD
    for group, fields in groupby(option_fields(), lambda field: field.group):
        about = type(getattr(PlanOptions(), group)).__doc__ if group else PlanOptions.__doc__
        yield f"## {group or 'the plan'}\n\n{about}\n"
        yield "| keyword, key | flag | default | what it says |"
        yield "| --- | --- | --- | --- |"
        yield from map(_row, fields)
        yield ""


def _row(field: OptionField) -> str:
    metavar = f" {field.metavar}" if field.metavar else ""
    cells = f"`{field.keyword}`", f"`{flag_of(field)}{metavar}`", _default(field), field.help
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: OptionField) -> str:
    return f"`{field.default}`" if field.default not in (None, "", ()) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
