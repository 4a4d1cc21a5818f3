"""Public models, each put through autopar: does eager run it, is it captured, planned, verified?

    python -m tests.zoo.public_models [NAMES...] [--output FILE] [--seconds N]

prints a row per model as it ends and writes them all as a Markdown table. NAMES are parts of
"library/name". Every model has a process of its own, which is ended after `--seconds`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from autopar.errors import AutoparError, PlanMismatchError
from tests.zoo.public import Entry, entries

MESH, CLUSTER = "2x2", "4xcpu"
STEPS = ("eager", "captured", "planned", "verified")


@dataclass(frozen=True)
class Row:
    """How far a model came: each of `STEPS` in `done` held. `why` is what stopped it, `known`
    whether that is autopar's own sentence."""

    entry: str
    done: tuple[str, ...] = ()
    seconds: float = 0.0
    why: str = ""
    known: bool = False

    @property
    def held(self) -> bool:
        """Whether autopar did all that it promises for a model that eager runs."""
        return "eager" not in self.done or self.done == STEPS

    def markdown(self) -> str:
        library, _, name = self.entry.partition("/")
        marks = ["yes" if step in self.done else "-" for step in STEPS]
        cells = [library, name, *marks, f"{self.seconds:.0f}", self.why.replace("|", "/")]
        return f"| {' | '.join(cells)} |"


HEAD = f"""\
| library | model | {" | ".join(STEPS)} | s | what stopped it |
| --- | --- | {" | ".join("---" for _ in STEPS)} | --: | --- |"""


def examine(entry: Entry, tell: Connection) -> None:
    """Sends the row of a model after each of its steps."""
    import autopar
    from autopar.verify import compare

    assert entry.build is not None
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    row, start = Row(str(entry)), time.perf_counter()

    def passed(step: str) -> None:
        nonlocal row
        row = replace(row, done=(*row.done, step), seconds=time.perf_counter() - start)
        tell.send(row)

    def spoken(text: str) -> None:
        if row.done == ("eager",) and text != "tracing the model":
            passed("captured")

    try:
        model, inputs = entry.build()
        args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
        model.train()(*args, **kwargs)
        start = time.perf_counter()
        passed("eager")
        plan = autopar.plan(model, inputs, cluster=CLUSTER, mesh=MESH, progress=spoken)
        passed("planned")
        try:
            report = compare(plan, model, inputs, dtype="float64")
        except PlanMismatchError:  # the model casts by itself
            report = compare(plan, model, inputs)
        report.check()
        passed("verified")
    except Exception as error:  # whatever a model does is a row of the table
        text = " ".join(f"{type(error).__name__}: {error}".split())
        row = replace(row, why=text, known=isinstance(error, AutoparError))
        tell.send(replace(row, seconds=time.perf_counter() - start))


def row_of(entry: Entry, limit_s: float) -> Row:
    """The row of a model, from a process that is ended after `limit_s`."""
    if entry.build is None:
        return Row(str(entry), why=f"not run: {entry.library} is not installed (the extra zoo)")
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=examine, args=(entry, send))
    process.start()
    send.close()
    row, end = Row(str(entry)), time.monotonic() + limit_s
    while receive.poll(max(0.0, end - time.monotonic())):
        try:
            row = receive.recv()
        except EOFError:
            break
    else:
        process.kill()
        row = replace(row, seconds=limit_s, why=f"not done after {limit_s:g} s")
    process.join()
    if not row.why and row.done != STEPS:
        row = replace(row, why=f"its process ended with status {process.exitcode}")
    return row


def summary(rows: list[Row]) -> str:
    """How many of those that eager runs came through each step."""
    ran = [row for row in rows if "eager" in row.done]
    counts = [f"{sum(step in row.done for row in ran)} {step}" for step in STEPS[1:]]
    share = 100 * sum(row.held for row in ran) / max(len(ran), 1)
    return f"{len(rows)} models, {len(ran)} run in eager: {', '.join(counts)} ({share:.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of library/name; all by default")
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--seconds", type=float, default=300, help="per model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        entry
        for entry in entries()
        if not given.names or any(part in str(entry) for part in given.names)
    ]
    rows: list[Row] = []
    for entry in chosen:
        rows.append(row_of(entry, given.seconds))
        print(rows[-1].markdown(), flush=True)
    print(summary(rows))
    if given.output:
        table = "\n".join([HEAD, *(row.markdown() for row in rows)])
        given.output.write_text(f"{summary(rows)}\n\n{table}\n")


if __name__ == "__main__":
    main()
