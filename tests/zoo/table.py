"""A table of models: what becomes of each, told row by row, so that one that hangs or runs out of
memory stops no other, and a table that was stopped goes on where it was."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.verify import compare

VERIFIED, DIFFERS, REFUSED = "verified", "differs", "refused"
ERROR, STOPPED, NOT_BY_EAGER = "error", "stopped", "not by eager"
MESH, CLUSTER = "2x2", "4xcpu"
LIMIT_S, LIMIT_BYTES = 300.0, 8 << 30

Make = Callable[[str], tuple[nn.Module, dict[str, Any]]]
"""From a name to a model and the keyword arguments to call it with."""


@dataclass(frozen=True)
class Row:
    """One model: its result; the seconds of capture, plan and verification; and what autopar said
    where it refused, or what else came of it (an error is what autopar did not say itself)."""

    name: str
    result: str
    seconds: float
    sentence: str = ""


def judge(make: Make, name: str) -> Row:
    """The row of one model, in this process."""
    start = time.perf_counter()

    def row(result: str, sentence: object = "") -> Row:
        return Row(
            name, result, round(time.perf_counter() - start, 1), " ".join(str(sentence).split())
        )

    try:
        model, inputs = make(name)
        _step(model, inputs)
    except Exception as error:  # whatever it is, eager does not run it
        return row(NOT_BY_EAGER, f"{type(error).__name__}: {error}")
    start = time.perf_counter()
    try:
        plan = autopar.plan(model, inputs, cluster=CLUSTER, mesh=MESH)
        report = compare(plan, model, inputs)
    except AutoparError as error:
        return row(REFUSED, error)
    except Exception as error:
        return row(ERROR, f"{type(error).__name__}: {error}")
    worst = report.failed[:1]
    return row(DIFFERS, f"{worst[0].name} by {worst[0].relative:.2g}") if worst else row(VERIFIED)


def _step(model: nn.Module, inputs: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        model(**inputs)["loss"].backward()
    model.zero_grad()


def tabulate(make: Make, names: Iterable[str], found: Path, again: bool = False) -> list[Row]:
    """The rows of `names`: those in the file `found`, and the others, which are written into it as
    they come. `again` makes all of them anew."""
    known = (
        {}
        if not found.exists()
        else {row["name"]: Row(**row) for row in map(json.loads, found.read_text().splitlines())}
    )
    rows = []
    for name in names:
        row = known.get(name)
        if row is None or again:
            row = apart(make, name)
            with found.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{row.name}: {row.result} in {row.seconds:.1f} s. {row.sentence}", flush=True)
        rows.append(row)
    return rows


def apart(make: Make, name: str) -> Row:
    """The row of one model, from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__, __name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(make, name, there))
    process.start()
    there.close()
    try:
        if here.poll(LIMIT_S):
            return here.recv()
        return Row(name, STOPPED, LIMIT_S, f"after {LIMIT_S:.0f} s")
    except EOFError:
        process.join()
        return Row(name, STOPPED, 0.0, f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _tell(make: Make, name: str, to: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    to.send(judge(make, name))


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a table, with a line of sums above it."""
    rows = list(rows)
    tried = [row for row in rows if row.result != NOT_BY_EAGER]
    verified = sum(row.result == VERIFIED for row in tried)
    lines = [
        f"{len(rows)} models, of which eager runs {len(tried)}; {verified} are verified.",
        "",
        "| model | result | seconds | sentence |",
        "| --- | --- | --: | --- |",
    ]
    for row in rows:
        sentence = row.sentence.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {row.name} | {row.result} | {row.seconds:.0f} | {sentence} |")
    return "\n".join(lines) + "\n"
