"""One rank of a scenario: every contender trains the same model, and they take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from statistics import median

import click
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plans.requests.strategies import MAX_AXES
from benchmarks import contenders
from benchmarks.contenders import Case, Contender
from benchmarks.emulated.outcome import CHOSEN, Entry, Outcome
from benchmarks.emulated.scenarios import SCENARIOS, Scenario, workload
from benchmarks.step_time import describe, loss_error, time_rounds


def work(name: str, cluster: str, rounds: int, *, orders: bool) -> Outcome:
    """What this rank does, together with the others; `cluster` is the path of a file."""
    scenario = SCENARIOS[name]
    dist.init_process_group("gloo")
    try:
        tried = orders_of(scenario, cluster) if orders else ways(scenario, cluster)
        return measure(scenario, tried, rounds)
    finally:
        dist.destroy_process_group()


Way = tuple[str, Callable[..., Contender]]
"""A name, and what makes its contender of a model, a batch and a loss."""


def measure(scenario: Scenario, tried: Iterable[Way], rounds: int) -> Outcome:
    """All ways to train in turns, `rounds` steps of each."""
    case = workload(scenario.name)
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    found: list[Contender] = []
    alike: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, make in tried:
        _say(f"{scenario.name}: {name}")
        try:
            each = make(deepcopy(model), batch, case.loss)
            each.step()
        except (AutoparError, ValueError) as error:
            if name == CHOSEN:
                raise
            left_out[name] = str(error).partition("\n")[0]
            continue
        twin = next((other.name for other in found if _same_plan(each, other)), None)
        if twin is None:
            each.name = name
            found.append(each)
        else:
            alike[name] = twin
    error = loss_error(found)
    _say(f"{scenario.name}: in turns")
    times = near_rounds(found, rounds)
    entries = [_entry(each, times[each.name]) for each in found]
    return Outcome(scenario.name, entries, alike, left_out, error)


_NEAR, _FIRST_ROUNDS = 2.0, 3


def near_rounds(found: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each one's steps by round. All have made one step. After three rounds those
    that take over twice as long as the fastest, and are not the choice, are done: what is asked is
    who is near it."""
    times = time_rounds(found, min(rounds, _FIRST_ROUNDS), warmup_rounds=1)
    limit = _NEAR * min(map(median, times.values()))
    near = [each for each in found if each.name == CHOSEN or median(times[each.name]) <= limit]
    if rounds > _FIRST_ROUNDS:
        for name, more in time_rounds(near, rounds - _FIRST_ROUNDS, warmup_rounds=0).items():
            times[name] += more
    return times


def ways(scenario: Scenario, cluster: str) -> Iterator[Way]:
    """All ways to train, autopar's own choice first."""
    case = workload(scenario.name)
    yield CHOSEN, contenders.planned(cluster=cluster)
    yield f"{CHOSEN}, one stage", contenders.planned(cluster=cluster, pipeline={"stages": 1})
    for stages in scenario.stages:
        yield (
            f"{CHOSEN}, {stages} stages",
            contenders.planned(cluster=cluster, pipeline={"stages": stages}),
        )
        cuts = evenly_cut(case, stages)
        yield (
            f"{CHOSEN}, {stages} stages of as many layers",
            contenders.planned(cluster=cluster, pipeline={"cuts": cuts}),
        )
    if scenario.nodes > 1 and scenario.per_node > 1:
        for mesh in (str(scenario.ranks), f"{scenario.nodes}x{scenario.per_node}"):
            yield f"{CHOSEN}, mesh {mesh}", contenders.planned(cluster=cluster, mesh=mesh)
    for strategy in MAX_AXES:
        yield (
            f"{CHOSEN}, {strategy}",
            contenders.planned(cluster=cluster, constraints={"strategy": strategy}),
        )
    yield "DDP", contenders.data_parallel
    yield "FSDP2", contenders.sharded(case.blocks)
    if scenario.nodes > 1 and scenario.per_node > 1:
        yield "HSDP", contenders.sharded(case.blocks, scenario.nodes)
    yield "tensor parallel by hand", contenders.by_hand(case.by_hand)


def orders_of(scenario: Scenario, cluster: str) -> Iterator[Way]:
    """Stages, their cuts chosen and even, in the order that is chosen and in those with names."""
    for stages in scenario.stages:
        cuts = evenly_cut(workload(scenario.name), stages)
        for schedule in ("auto", "1f1b", "eager-1f1b", "gpipe", "zb-h1"):
            planned = contenders.planned(
                cluster=cluster, pipeline={"stages": stages, "schedule": schedule}
            )
            yield f"{stages} stages, {schedule}", planned
        for schedule in ("auto", "1f1b"):
            planned = contenders.planned(
                cluster=cluster, pipeline={"cuts": cuts, "schedule": schedule}
            )
            yield f"{stages} stages of as many layers, {schedule}", planned


def evenly_cut(case: Case, stages: int) -> list[str]:
    """The blocks that stages begin with which have as many of them each."""
    with torch.device("meta"):
        model = case.build()
    blocks = list(case.blocks(model))
    starts = [blocks[k * len(blocks) // stages] for k in range(1, stages)]
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in starts]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        click.echo(text, err=True)


def _same_plan(one: Contender, other: Contender) -> bool:
    mine, theirs = contenders.plan_of(one), contenders.plan_of(other)
    return mine is not None and theirs is not None and mine.structure == theirs.structure


def _entry(each: Contender, step_ms: list[float]) -> Entry:
    plan = contenders.plan_of(each)
    rounded = [round(ms, 2) for ms in step_ms]
    if plan is None:
        return Entry(each.name, rounded)
    return Entry(each.name, rounded, round(plan.estimates.step_ns / 1e6, 2), describe(plan))
