"""Golden plans: recomputed, compared, and written anew with `--update`.

Each plan is computed in a process of its own, forked from one that has imported torch. Targets of
one name therefore do not collide, and one that crashes ends alone. The result is judged in this
process, which imports nothing of a target.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.driver.gate.golden_worker import Replanned, serve
from autopar.driver.gate.recipe import PLAN_SUFFIX, Recipe, cluster_file, golden_of, read_recipe
from autopar.errors import AutoparError, PlanError, RecipeError
from autopar.ir.units import format_ppm
from autopar.plans.plan import Plan
from autopar.report.checks import CheckOutcome
from autopar.report.difference import compare
from autopar.report.verdict import SAME, Bounds, judge

_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Check:
    """The options of a check. `cache` is a folder of plans computed before, or None. With `update`,
    `bounds` play no part: a plan that differs by what counts for a golden plan is written anew."""

    update: bool = False
    allow_gap: bool = False
    bounds: Bounds | None = None
    cache: Path | None = None
    num_processes: int = 1


def find_recipes(places: Iterable[str]) -> tuple[Path, ...]:
    """The TOML files in folders, or files that are given as such, in order of their names.

    A file that others name as their cluster is no recipe. RecipeError if a place does not exist, if
    a folder has no recipe, or if a plan has no TOML file.
    """
    paths: dict[Path, None] = {}
    for place in map(Path, places):
        if place.suffix == ".toml" and place.is_file():
            paths[place] = None
            continue
        if not place.is_dir():
            raise RecipeError(f"{place} is no folder of golden plans, and no .toml file")
        files = sorted(place.glob("*.toml"))
        clusters = {cluster_file(path) for path in files}
        recipes = [path for path in files if path.resolve() not in clusters]
        if not recipes:
            raise RecipeError(f"{place} has no .toml file that says how a plan is made")
        plans = {golden_of(path) for path in recipes}
        for stray in sorted(set(place.glob("*" + PLAN_SUFFIX)) - plans):
            name = stray.name.removesuffix(PLAN_SUFFIX)
            raise RecipeError(
                f"{stray}: there is no {name}.toml beside it; delete it, or write one"
            )
        paths |= dict.fromkeys(recipes)
    return tuple(paths)


def run_all(
    paths: Sequence[Path], check: Check, on_outcome: Callable[[CheckOutcome], None]
) -> list[CheckOutcome]:
    """The outcomes of all recipes, in order; `on_outcome` is called with each as soon as it is
    known."""
    with ThreadPoolExecutor(max(1, check.num_processes)) as pool:
        futures = {pool.submit(_check, path, check): k for k, path in enumerate(paths)}
        outcomes: dict[int, CheckOutcome] = {}
        try:
            for future in as_completed(futures):
                outcome = future.result()
                outcomes[futures[future]] = outcome
                on_outcome(outcome)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[k] for k in range(len(paths))]


def _check(path: Path, check: Check) -> CheckOutcome:
    name = path.with_suffix("").as_posix()
    replanned = Replanned()
    try:
        recipe = read_recipe(path)
        replanned = _in_process(recipe, check.cache)
        if replanned.error:
            outcome = CheckOutcome(name, "error", replanned.error)
        else:
            outcome = _compared(name, recipe.golden, Plan.from_bytes(replanned.plan, name), check)
    except (AutoparError, OSError) as error:
        outcome = CheckOutcome(name, "error", str(error))
    return replace(outcome, from_cache=replanned.from_cache, warnings=replanned.warnings)


def _in_process(recipe: Recipe, cache: Path | None) -> Replanned:
    _PROCESSES.set_forkserver_preload(["autopar.driver.api"])
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=serve, args=(sender, recipe, cache), daemon=True)
    process.start()
    sender.close()
    try:
        replanned: Replanned = receiver.recv()
    except EOFError:
        process.join()
        return Replanned(error=f"the process that planned it ended with status {process.exitcode}")
    finally:
        receiver.close()
    process.join()
    return replanned


def _compared(name: str, golden: Path, plan: Plan, check: Check) -> CheckOutcome:
    try:
        old = Plan.load(golden) if golden.exists() else None
        if old is not None and old.provenance.is_interrupted:
            raise PlanError(
                f"{golden.name} is of a search that was interrupted: --update makes it anew"
            )
    except PlanError:
        if not check.update:
            raise
        old = None
    if old is None:
        if not check.update:
            return CheckOutcome(name, "missing", f"there is no {golden.name}: --update makes it")
        write_golden(plan, golden, check.allow_gap)
        return CheckOutcome(name, "created", step_ns=plan.estimates.step_ns)
    verdict = judge(compare(old, plan), None if check.update else check.bounds)
    if verdict.status == SAME:
        return CheckOutcome(name, "same", verdict=verdict, step_ns=plan.estimates.step_ns)
    if check.update:
        write_golden(plan, golden, check.allow_gap)
    status = "updated" if check.update else "different"
    return CheckOutcome(name, status, verdict=verdict, step_ns=plan.estimates.step_ns)


def write_golden(plan: Plan, golden: Path, allow_gap: bool) -> None:
    """Save a golden plan. PlanError if it is not proven optimal, unless a gap is allowed."""
    if plan.provenance.is_limited and not allow_gap:
        raise PlanError(
            f"{golden.name} is not written: the search came to its limit of work, and another "
            "version may get further. Raise search.work_limit, or allow that: allow_gap=True in a "
            "test, --allow-gap for autopar check"
        )
    if not (plan.provenance.is_proven or allow_gap):
        gap = format_ppm(plan.provenance.gap_ppm)
        raise PlanError(
            f"{golden.name} is not written: its plan is not proven optimal (gap {gap}), and "
            "another one may be found next time. Leave out search.time_limit, or allow a gap: "
            "allow_gap=True in a test, --allow-gap for autopar check"
        )
    golden.parent.mkdir(parents=True, exist_ok=True)
    plan.save(golden)
