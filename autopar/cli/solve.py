"""`autopar solve`: a problem file of the public contest in, a list of choices out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from autopar.cli.terminal import debug_option, spoken_progress
from autopar.errors import InfeasibleError, SolverError

if TYPE_CHECKING:
    from autopar.ir.problem import Solution
    from autopar.solver.clock import Clock
    from autopar.solver.contest_files import ContestFile, Stated

_RESERVE_S = 2.0
"""Time outside of the solver: starting Python, writing the answer."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="For all of it, reading included, without the one-time compilation per machine. It is "
    "used up unless a solution is proven to be optimal. Default: small problems are solved to the "
    "end, large ones for a fixed number of rounds.",
)
@click.option("--log", is_flag=True, help="Print progress, with seconds, on standard error.")
@debug_option
def solve(file: Path, time_limit: float | None, log: bool) -> None:
    """Solve the problem in FILE, in the format of the ASPLOS/EuroSys 2025 contest.

    The last line lists the choice of each node; above it stand its cost, a proven lower bound and
    the gap between them. The status is 3 if the problem has no solution.
    """
    from autopar.solver.clock import Clock

    started = monotonic()
    clock = Clock(None if time_limit is None else time_limit - _reserve_s(time_limit))
    with spoken_progress(quiet=log) as spoken:
        progress = partial(_log, started) if log else spoken
        progress(f"reading {file}")
        from autopar.solver.contest_files import load

        stated_by_file = load(file)
        solution, stated = _solve(stated_by_file, file, time_limit, clock, progress)
    cost = stated_by_file.cost(solution.choice)
    bound = min(cost, stated.lower_bound(solution.bound))
    limit = stated_by_file.usage_limit
    peak = stated_by_file.peak(solution.choice)
    if limit is not None and peak > limit:
        raise SolverError(f"{file}: a plan of usage {peak} was found, which is a defect of autopar")
    gap = (cost - bound) / cost if cost else 0.0
    click.echo(f"cost    {cost}")
    click.echo(f"bound   {bound}")
    click.echo(f"gap     {100 * gap:.3f} % ({'optimal' if bound == cost else 'feasible'})")
    click.echo(f"usage   {peak} of {'any' if limit is None else limit}")
    click.echo(f"[{', '.join(map(str, solution.choice))}]")


def _reserve_s(time_limit: float) -> float:
    return min(_RESERVE_S + time_limit / 100, time_limit / 2)


def _log(started: float, text: str) -> None:
    click.echo(f"{monotonic() - started:8.1f} s  {text}", err=True)


def _solve(
    file: ContestFile,
    path: Path,
    time_limit: float | None,
    clock: Clock,
    progress: Callable[[str], None],
) -> tuple[Solution, Stated]:
    """The best solution without choices that the file forbids, or else with them."""
    from autopar.ir.problem import Status
    from autopar.solver import get_ready
    from autopar.solver import solve as solve_problem

    for forbid in (True, False):
        stated = file.state(forbid=forbid)
        left = None
        if time_limit is not None:
            progress("compiling loops, unless that was done before")
            with clock.stopped():
                get_ready(stated.problem)
            left = clock.left_s()
        solution = solve_problem(stated.problem, time_limit_s=left, progress=progress)
        if solution.choice:
            return solution, stated
        if solution.status is Status.LIMIT:
            bound = stated.lower_bound(solution.bound)
            tried = "" if time_limit is None else f" within {time_limit:g} s"
            raise SolverError(
                f"{path}: no solution was found{tried}, and none was proven impossible. No "
                f"solution costs less than {bound}. Raise --time-limit"
            )
        if solution.conflict is not None or file.not_allowed_above() is None:
            break
    raise InfeasibleError(f"{path}: there is no solution: {solution.statistics['reason']}")
