"""A table of public models: eager runs each, autopar captures, plans and verifies it?

    python -m tests.zoo.table [NAMES...] --found rows.jsonl [--markdown table.md]

NAMES are beginnings of "library/model" ("causal_lm/llama", "torchvision/"); without them, the whole
table. Every model has a process of its own, so that one that hangs or runs out of memory stops no
other; rows are written as they come, and a table that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compile import ModelCall, compile_call
from autopar.driver.planning import answer, describe_cluster, make_call_request
from autopar.driver.verify import compare_program
from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.runtime.module.building import split_inputs
from autopar.runtime.torch_private import flatten
from autopar.tracer import Traced
from tests.zoo.public import entries

VERIFIED, DIFFERS, REFUSED = "verified", "differs", "refused"
ERROR, STOPPED, NOT_BY_EAGER, ABSENT = "error", "stopped", "not by eager", "not installed"
MESH, CLUSTER = "2x2", "4xcpu"
LIMIT_S, LIMIT_BYTES = 300.0, 14 << 30


@dataclass(frozen=True)
class Row:
    """One model: its result, what was reached before it, the seconds of capture, plan and
    verification, and what autopar said where it refused, or what else came of it (an error is what
    autopar did not say itself)."""

    name: str
    result: str
    reached: str = ""
    seconds: float = 0.0
    sentence: str = ""


def judge(name: str, tell: Connection) -> None:
    """Sends the row of a model, at first after each step that it may stop in."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    reached, start = "", time.perf_counter()

    def row(result: str, sentence: object = "") -> None:
        seconds = round(time.perf_counter() - start, 1)
        tell.send(Row(name, result, reached, seconds, _without_places(str(sentence))))

    def passed(step: str) -> None:
        nonlocal reached
        reached = step
        row(STOPPED)

    build = entries()[name]
    assert not isinstance(build, str)
    try:
        model, inputs = build()
        args, kwargs = split_inputs(inputs)
        _step(model.train(), args, kwargs)
    except Exception as error:  # whatever it is, eager does not run it
        return row(NOT_BY_EAGER, f"{type(error).__name__}: {error}")
    start = time.perf_counter()
    passed("eager")
    try:
        report = _verify(model, args, kwargs, passed)
        reached = "verified" if not report.failed else reached
    except AutoparError as error:
        return row(REFUSED, error)
    except Exception as error:  # whatever a model does is a row of the table
        return row(ERROR, f"{type(error).__name__}: {error}")
    if report.failed:
        worst = report.failed[0]
        found = f"{len(report.failed)} tensors, {worst.name} by {worst.relative:.2g}"
        return row(DIFFERS, "; ".join((found, *report.notes)))
    return row(VERIFIED)


def _without_places(text: str) -> str:
    """On one line, with files from their package on: where packages are is this machine's own."""
    for place in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{place}/", "")
    return " ".join(text.split())


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        found = model(*args, **kwargs)
    leaves = flatten(found)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors:
        tensors[0].sum().backward()
    model.zero_grad()


def _verify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], passed: Any) -> Any:
    """As `autopar.plan` and then `autopar.verify`, with one trace for both."""
    cluster, options = describe_cluster(CLUSTER, None), Options(mesh=MESH)
    call = ModelCall(model, args, kwargs, options)

    def find(traced: Traced) -> Plan:
        passed("captured")
        plan = answer(make_call_request(call, traced, cluster), lambda _: None)
        passed("planned")
        return plan

    return compare_program(compile_call(call, find), call)


def tabulate(names: Iterable[str], found: Path, again: bool = False) -> list[Row]:
    """The rows of `names`: those in the file `found`, and the others, which are written into it as
    they come. `again` makes all of them anew."""
    known = {}
    if found.exists():
        known = {row["name"]: Row(**row) for row in map(json.loads, found.read_text().splitlines())}
    rows = []
    for name in names:
        row = known.get(name)
        if row is None or again:
            row = apart(name)
            with found.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{row.name}: {row.result} in {row.seconds:.1f} s. {row.sentence}", flush=True)
        rows.append(row)
    return rows


def apart(name: str, limit_s: float = LIMIT_S) -> Row:
    """The row of one model, from a process that is ended after `limit_s`."""
    build = entries()[name]
    if isinstance(build, str):
        return Row(name, ABSENT, sentence=build)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(name, there))
    process.start()
    there.close()
    row, end = Row(name, STOPPED), time.monotonic() + limit_s
    try:
        while here.poll(max(0.0, end - time.monotonic())):
            row = here.recv()
        return Row(name, row.result, row.reached, limit_s, f"after {limit_s:.0f} s")
    except EOFError:
        process.join()
        if row.result != STOPPED:
            return row
        why = f"the process ended with {process.exitcode}"
        return Row(name, STOPPED, row.reached, row.seconds, why)
    finally:
        process.kill()
        process.join()


def _alone(name: str, tell: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    judge(name, tell)


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a table, with a line of sums above it."""
    rows = list(rows)
    tried = [row for row in rows if row.result not in (NOT_BY_EAGER, ABSENT)]
    verified = sum(row.result == VERIFIED for row in tried)
    share = 100 * verified / max(len(tried), 1)
    lines = [
        f"{len(rows)} models, of which eager runs {len(tried)}; {verified} are verified "
        f"({share:.1f} %).",
        "",
        "| model | result | reached | seconds | sentence |",
        "| --- | --- | --- | --: | --- |",
    ]
    for row in rows:
        sentence = row.sentence.replace("|", "\\|").replace("<", "&lt;")
        cells = row.name, row.result, row.reached, f"{row.seconds:.0f}", sentence
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of library/model; all by default")
    parser.add_argument("--found", type=Path, required=True, help="rows found, one JSON a line")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--again", action="store_true", help="also what is found already")
    options = parser.parse_args()
    wanted = tuple(options.names)
    names = [name for name in entries() if not wanted or name.startswith(wanted)]
    rows = tabulate(names, options.found, options.again)
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
