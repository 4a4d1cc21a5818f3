"""Whether planning arrives: models that people train in 2026, planned with nothing said.

    python -m benchmarks.arrive
    python -m benchmarks.arrive --case "Mixtral-8x22B, 512 x 4,096" --limit 600 --markdown

Each case has a process of its own, which `--limit` CPU seconds end. The yardstick are the CPU
seconds of importing torch and a model class of transformers in that process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import click
import msgspec

from benchmarks.arrive.models import CASES
from benchmarks.plan_time import ROOT, peak_bytes
from benchmarks.tables import tell

TITLE = "CPU seconds of planning, and what came out"
HEADER = (
    "model, batch", "cluster", "imports s", "first fit s", "plan s", "imports", "step s", "gap %",
    "MFU %", "memory %", "host GiB", "peak GiB",
)  # fmt: skip


class Arrived(msgspec.Struct, frozen=True):
    """A case: CPU seconds of the imports, from then on until a first plan fits and until the plan
    comes, and what it is. What did not come is None, and `why` says what was seen last."""

    imports_s: float
    first_fit_s: float | None = None
    plan_s: float | None = None
    step_ns: int = 0
    gap_ppm: int = 0
    mfu_ppm: int = 0
    used_share: float = 0.0
    host_bytes: int = 0
    peak_bytes: int = 0
    why: str = ""


def measure(case: str, limit_s: float) -> Arrived:
    """Plan a case in this process, which has done nothing so far, until `limit_s` CPU seconds are
    gone."""
    # transformers imports what a class needs when the class is asked for.
    from transformers import LlamaForCausalLM  # noqa: F401  # pyright: ignore[reportUnusedImport]

    imports_s = time.process_time()
    import autopar
    from autopar.errors import AutoparError
    from autopar.plans.provenance import SearchStep
    from benchmarks.arrive.models import built

    found: dict[str, float] = {}
    last = [""]

    def say(text: str) -> None:
        last[0] = text
        if isinstance(text, SearchStep) and text.best is not None:
            found.setdefault("first", time.process_time() - imports_s)

    with _CpuLimit(limit_s):
        try:
            model, inputs = built(case)
            its = CASES[case]
            plan = autopar.plan(model, inputs, cluster=its.cluster, progress=say, **its.options)
        except (_OutOfTime, AutoparError) as error:
            return Arrived(
                imports_s, found.get("first"), None, peak_bytes=peak_bytes(),
                why=f"{error}; last: {last[0]}",
            )  # fmt: skip
    plan_s, estimates = time.process_time() - imports_s, plan.estimates
    stages = [each.estimates for each in plan.stages]
    return Arrived(
        imports_s=imports_s,
        first_fit_s=found.get("first", plan_s),
        plan_s=plan_s,
        step_ns=estimates.step_ns,
        gap_ppm=plan.provenance.gap_ppm,
        mfu_ppm=estimates.mfu_ppm,
        used_share=max(each.memory.total / each.memory_limit for each in stages),
        host_bytes=max(each.host_bytes for each in stages),
        peak_bytes=peak_bytes(),
    )


class _OutOfTime(BaseException):
    """No handler of errors is to take it for one."""


class _CpuLimit:
    """Within it, `_OutOfTime` comes after so many CPU seconds of this process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        def end(*_: object) -> None:
            raise _OutOfTime(f"none in {self._limit_s:g} CPU seconds")

        signal.signal(signal.SIGPROF, end)
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        # Native code may not come back to Python: then the process ends.
        hard_s = int(time.process_time() + 2 * self._limit_s + 60)
        resource.setrlimit(
            resource.RLIMIT_CPU, (hard_s, resource.getrlimit(resource.RLIMIT_CPU)[1])
        )

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def in_own_process(case: str, limit_s: float) -> Arrived:
    """`measure` in a fresh process with one thread."""
    command = [sys.executable, "-m", "benchmarks.arrive", "--worker", "--case", case]
    done = subprocess.run(
        [*command, "--limit", str(limit_s)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        return Arrived(0.0, why=f"ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Arrived)


def row(case: str, found: Arrived) -> list[str]:
    """A case as cells, in the order of `HEADER`."""
    first = "" if found.first_fit_s is None else f"{found.first_fit_s:.0f}"
    cells = [case, CASES[case].cluster, f"{found.imports_s:.1f}", first]
    if found.plan_s is None:
        return [*cells, "none", *[""] * 6, f"{found.peak_bytes / 2**30:.2f}"]
    return [
        *cells,
        f"{found.plan_s:.0f}",
        f"{found.plan_s / found.imports_s:.0f}",
        f"{found.step_ns / 1e9:.4g}",
        f"{found.gap_ppm / 1e4:.2g}",
        f"{found.mfu_ppm / 1e4:.1f}",
        f"{100 * found.used_share:.1f}",
        f"{found.host_bytes / 2**30:.1f}",
        f"{found.peak_bytes / 2**30:.2f}",
    ]


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, type=click.Choice([*CASES]))
@click.option("--limit", "limit_s", type=float, default=1200, show_default=True)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(cases: tuple[str, ...], limit_s: float, as_markdown: bool, worker: bool) -> None:
    if worker:
        click.echo(msgspec.json.encode(measure(cases[0], limit_s)))
        return
    rows: list[list[str]] = []
    for case in cases or CASES:
        found = in_own_process(case, limit_s)
        rows.append(row(case, found))
        click.echo(f"{': '.join(rows[-1])} {found.why}", err=True)
    tell(TITLE, HEADER, rows, as_markdown=as_markdown)
