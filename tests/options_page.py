"""docs/options.md, made of the options: `python -m tests.options_page` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from autopar.cli.plan_flags import flag_of
from autopar.plans.requests.plan_options import GROUPS, OptionField, PlanOptions, option_fields

PAGE = Path(__file__).parents[1] / "docs/options.md"
HEAD = """# Options of a plan

`autopar.compile`, `autopar.plan` and `autopar.frontier` take these options. Options of the plan are
keywords. A group of options is one keyword, as an object that editors know or as a mapping:

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

`autopar plan` has a flag for each option (`--memory-limit 72GiB`). A recipe ([gate.md](gate.md))
has a key, in the table of its group (`[memory]`). The file of a plan records them under
`provenance.options`, and `autopar explain` plans anew from there. A frontier has one stage by
default.

A search shows what it tries, and the best plan so far, on standard error. Commands on a terminal
show a live table of candidates. Elsewhere it is a line every ten seconds. `autopar.compile` does so
on rank 0. `autopar.plan(progress=print)` hands each text to a function instead. Ctrl-C ends the
search of `autopar plan` with the best plan so far ([errors.md](errors.md)).

**A wider search never gives a longer step.** `stages="auto"`, `microbatches="auto"`,
`residency="auto"`, `loss_chunks="auto"`, `mesh="auto:3"` and `margin=True` add candidates and
remove none. Plans are compared as modelled, and the predicted step is simulated. If the best plan
uses something that was left open, the best plan without it is searched too, and the shorter
predicted step is taken. Limits of the search are counted in work, except `time_limit`. A given
number of stages or microbatches may still be better than that of `auto`: not all are tried.

**A search ends** at `search.work_limit`, about two CPU minutes, with the best plan so far; it goes
on to a first plan. The plan has the status `limited` then, and says what was not looked at, and how
good it is among the candidates that were. It has no margin. A wider search may be worse than a
narrow one that was not ended. Small models come nowhere near the limit. A frontier has none, nor
have `explain` and what-if, which plan anew on the plan's own mesh.

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
