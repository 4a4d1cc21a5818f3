"""docs/options.md, made of the options: `python -m tests.options_page` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from autopar.cli.plan_flags import flag_of
from autopar.plans.plan_options import GROUPS, OptionField, PlanOptions, option_fields

PAGE = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Options of a plan

`autopar.compile`, `autopar.plan` and `autopar.frontier` take these. Those of the plan are keywords;
those of a group are a keyword together, as an object that editors know or as a mapping:

```python
plan = autopar.plan(
    model,
    inputs,
    cluster="2x8xH100",
    microbatches="auto",
    memory=autopar.MemoryOptions(limit="72GiB", residency="auto"),
    constraints={"strategy": "fsdp"},
)
```

`autopar plan` has a flag for each (`--memory-limit 72GiB`), a recipe ([gate.md](gate.md)) a key, in
the table of its group (`[memory]`). The file of a plan records them under `provenance.options`, and
`autopar explain` plans it again from there. A frontier is of one stage and one microbatch where
nobody says.

**To ask for more never gives a longer step.** `stages="auto"`, `microbatches="auto"`,
`residency="auto"`, `loss_chunks="auto"`, `mesh="auto:3"` and `margin=True` widen the search: what
is looked at without them is looked at with them. Plans are compared as modelled, and the predicted
step is simulated. The best plan may make use of something that was left open: then the best one
without it is found too, and the shorter predicted step is taken. Limits of the search are counted
in work, except `time_limit`. A number of stages or microbatches that is given may still be better
than the one that `auto` finds: not all of them are tried.

The names that options had without groups (`memory_limit=`, `--stages`, `pins = [...]`) work until
the next release, with a `DeprecationWarning`.
"""


def page() -> str:
    """The page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield HEAD
    for group, fields in groupby(option_fields(), lambda field: field.group):
        about = GROUPS[group].__doc__ if group else PlanOptions.__doc__
        title = f"{group}: autopar.{GROUPS[group].__name__}" if group else "The plan"
        yield f"## {title}\n\n{about}\n"
        yield "| name | flag | default | what it says |"
        yield "| --- | --- | --- | --- |"
        yield from map(_row, fields)
        yield ""


def _row(field: OptionField) -> str:
    metavar = f" {field.metavar}" if field.metavar else ""
    cells = f"`{field.name}`", f"`{flag_of(field)}{metavar}`", _default(field), field.help
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: OptionField) -> str:
    return f"`{field.default}`" if field.default not in (None, "", ()) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
