"""Why a plan in stages is as it is, as far as the plan itself says. It shows what each stage has,
the step with a cut moved, what waiting costs, and what microbatches in flight hold.

Steps other than the plan's own are simulated: with the same schedule, or that of more microbatches
of the same size, and with the times of the plan's stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import msgspec
from msgspec.structs import astuple
from rich.console import Group, RenderableType
from rich.text import Text

from autopar.errors import StageError
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.units import format_bytes, format_ns, format_percent, format_share
from autopar.plans.estimates import MicrobatchTimes
from autopar.plans.pipeline_orders import named_schedule
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import Plan
from autopar.plans.requests.matching import general
from autopar.report.names import WHOLE_MODEL
from autopar.report.pipeline import StageRow, busiest, pipeline_content, simulated_plan
from autopar.report.printed import name as name_text
from autopar.report.printed import table as new_table
from autopar.report.printed import with_rest
from autopar.report.stage_content import Block, blocks
from autopar.report.waits import simulated_ranks

_SHARE = 0.005
"""Modules that take a smaller share of their stage are left out."""

_MAX_ROWS = 40
"""Rows that are printed; a last line counts the rest."""

_BATCHES = (2, 4)
"""The multiples of the batch that are looked at."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """`count` modules of a pattern in a stage: compute of one microbatch in all of them, which is
    the fraction `share` of the stage's compute."""

    stage: int
    module: str
    count: int
    forward_ns: int
    backward_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class MovedCut:
    """About what the step and the memory of stage `gains` would be, if it had the module `module`
    of its neighbour `loses`. Such modules are assumed to take what they take in these stages
    now."""

    module: str
    loses: int
    gains: int
    step_ns: int
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True)
class LargerBatch:
    """The step with more microbatches of the same size, and how many of them stages have in flight
    then."""

    microbatches: int
    step_ns: int
    bubble: float
    tokens_per_s: int
    samples_per_s: int
    in_flight: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineReasons:
    """What a plan in stages says of itself. `even_ns` is the step if all stages took equally long;
    `batches` is empty where the schedule has no name."""

    step_ns: int
    schedule: str
    microbatches: int
    binds: tuple[str, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[StagePart, ...]
    even_ns: int
    moved: tuple[MovedCut, ...]
    batches: tuple[LargerBatch, ...]

    def sections(self) -> Iterator[tuple[str, RenderableType]]:
        """What limits the step, why it is cut so, what waiting costs, and what is held."""
        yield "What limits the step", Text("\n".join(self.binds))
        yield "What each stage has: compute of one microbatch, with nothing sent", _parts(self)
        yield "Why it is cut so", _cuts(self)
        yield "What waiting costs", _waiting(self)
        yield "What is held in flight", _held(self.stages)


def pipeline_reasons(plan: Plan) -> PipelineReasons | None:
    """What a plan in stages says of itself; None where there is one."""
    content = pipeline_content(plan)
    if content is None:
        return None
    table, simulated, ranks = simulated_plan(plan)
    rows = content.stages
    sent_ns = sum(each.sent_ns for each in ranks[busiest(ranks)].actions)
    binds = [content.binds[0]]
    if sent_ns:
        binds.append(f"of that, messages are under way to it for {format_ns(sent_ns)}")
    stages = plan.estimates.stages
    shared = _mean(plan)
    even = tuple(msgspec.structs.replace(each, microbatch=shared) for each in stages)
    return PipelineReasons(
        step_ns=simulated.step_ns,
        schedule=plan.structure.schedule,
        microbatches=plan.structure.microbatches,
        binds=tuple(binds),
        stages=rows,
        parts=tuple(_stage_parts(plan)),
        even_ns=simulate_pipeline(
            table, even, plan.estimates.delays, plan.estimates.shared
        ).step_ns,
        moved=tuple(_moved_cuts(plan, table, rows)),
        batches=tuple(_larger_batches(plan)),
    )


def _mean(plan: Plan) -> MicrobatchTimes:
    """The mean times of all stages, weighted by their numbers of devices."""
    sizes = [stage.structure.num_devices for stage in plan.stages]
    times = [astuple(stage.estimates.microbatch) for stage in plan.stages]
    return MicrobatchTimes(
        *(sum(map(mul, each, sizes)) // sum(sizes) for each in zip(*times, strict=True))
    )


def _blocks_of(plan: Plan, stage: int) -> Mapping[str, Block]:
    ops = tuple(plan.estimates.stages[stage].ops.values())
    return {block.module: block for block in blocks(ops)}


def _stage_parts(plan: Plan) -> Iterator[StagePart]:
    microbatches = plan.structure.microbatches
    for stage in range(len(plan.structure.stages)):
        by_module = _blocks_of(plan, stage)
        whole_ns = sum(b.forward_ns + b.backward_ns for b in by_module.values()) or 1
        for block in by_module.values():
            share = (block.forward_ns + block.backward_ns) / whole_ns
            if share >= _SHARE:
                yield StagePart(
                    stage,
                    block.module or WHOLE_MODEL,
                    max(1, block.count // microbatches),
                    block.forward_ns // microbatches,
                    block.backward_ns // microbatches,
                    share,
                )


def _moved_cuts(
    plan: Plan, actions: PipelineSchedule, rows: Sequence[StageRow]
) -> Iterator[MovedCut]:
    """Cuts within a list of modules that have parameters, moved by one of them either way."""
    for row in rows[1:]:
        before = row.stage - 1
        listed, _, digits = row.start.rpartition(".")
        if not (digits.isdecimal() and len(digits) < 10):
            continue
        for loses, gains, module in (
            (row.stage, before, row.start),
            (before, row.stage, f"{listed}.{int(digits) - 1}"),
        ):
            params = plan.structure.stages[loses].params
            is_all = all(name.startswith(f"{module}.") for name in params)
            is_there = module in _listed(plan, loses, module) and _has(plan, loses, module)
            if is_there and not is_all and _is_known(plan, loses, gains, module):
                yield _moved(plan, actions, rows[gains], loses, module)


def _is_known(plan: Plan, loses: int, gains: int, module: str) -> bool:
    """Whether the times of `module` are known in both stages: all modules like it there have
    parameters like its own. The stage that gains it has such modules, or as many devices as the
    other."""
    stages = plan.structure.stages
    sizes = {stages[stage].num_devices for stage in (loses, gains)}
    kinds = {
        tuple(
            (name.removeprefix(each), param.shape, param.dtype)
            for name, param in sorted(stages[stage].params.items())
            if name.startswith(f"{each}.")
        )
        for stage in (loses, gains)
        for each in _listed(plan, stage, module)
    }
    return len(kinds) == 1 and (len(sizes) == 1 or _has(plan, gains, module))


def _has(plan: Plan, stage: int, module: str) -> bool:
    """Whether a stage has modules like `module`, and the plan says what they take."""
    return bool(_listed(plan, stage, module)) and general(module) in _blocks_of(plan, stage)


def _listed(plan: Plan, stage: int, module: str) -> tuple[str, ...]:
    """The modules like `module` that a stage has parameters of."""
    pattern, depth = general(module), module.count(".") + 1
    params = plan.structure.stages[stage].params
    modules = dict.fromkeys(".".join(name.split(".")[:depth]) for name in params)
    return tuple(each for each in modules if general(each) == pattern)


def _moved(
    plan: Plan, actions: PipelineSchedule, row: StageRow, loses: int, module: str
) -> MovedCut:
    """The cut that gives `module` to the stage of `row`."""
    gains = row.stage
    # With the figures of the stage that gains it, if that has such modules already.
    known_stage = gains if _has(plan, gains, module) else loses
    stages = list(plan.estimates.stages)
    for stage, source, sign in ((loses, loses, -1), (gains, known_stage, 1)):
        microbatch = _with_block(plan, stage, source, module, sign)
        stages[stage] = msgspec.structs.replace(stages[stage], microbatch=microbatch)
    return MovedCut(
        module,
        loses,
        gains,
        simulate_pipeline(actions, stages, plan.estimates.delays, plan.estimates.shared).step_ns,
        row.memory_bytes + _held_by_one(plan, known_stage, module, row.in_flight),
        row.memory_limit_bytes,
    )


def _with_block(plan: Plan, stage: int, source: int, module: str, sign: int) -> MicrobatchTimes:
    """The times of `stage` with one module like `module` more, or less. The module takes the same
    fraction of the times of stage `source` as of its compute."""
    by_module, number = _blocks_of(plan, source), len(_listed(plan, source, module))
    block, source_times = by_module[general(module)], plan.estimates.stages[source].microbatch
    forward = block.forward_ns / number / (sum(b.forward_ns for b in by_module.values()) or 1)
    backward = block.backward_ns / number / (sum(b.backward_ns for b in by_module.values()) or 1)
    times = plan.estimates.stages[stage].microbatch

    def with_one(name: str) -> int:
        share = (
            0 if name in ("update_ns", "action_ns") else forward if "forward" in name else backward
        )
        return max(0, getattr(times, name) + sign * round(getattr(source_times, name) * share))

    return MicrobatchTimes(**{name: with_one(name) for name in MicrobatchTimes.__struct_fields__})


def _held_by_one(plan: Plan, stage: int, module: str, in_flight: int) -> int:
    """Bytes of a device that one module like `module` takes in stage `stage`: its share of the
    memory of parameters, and what it saves for each microbatch in flight."""
    own, params = plan.estimates.stages[stage], plan.structure.stages[stage].params
    modules = _listed(plan, stage, module)
    inside = sum(
        p.num_bytes for n, p in params.items() if n.startswith(tuple(f"{m}." for m in modules))
    )
    everything = sum(p.num_bytes for p in params.values()) or 1
    memory = own.memory
    saved = _blocks_of(plan, stage)[general(module)].saved_bytes
    return memory.at_rest * inside // (everything * len(modules)) + saved * in_flight // len(
        modules
    )


def _larger_batches(plan: Plan) -> Iterator[LargerBatch]:
    structure, estimates = plan.structure, plan.estimates
    if structure.schedule_rows:
        return
    for times in _BATCHES:
        count = times * structure.microbatches
        try:
            table = named_schedule(structure.schedule, structure.num_ranks, count)
        except StageError:
            return
        simulated = simulate_pipeline(table, estimates.stages, estimates.delays, estimates.shared)
        ranks = simulated_ranks(table, simulated)
        step_ns = max(1, simulated.step_ns)
        yield LargerBatch(
            count,
            step_ns,
            ranks[busiest(ranks)].waits_ns / step_ns,
            times * estimates.tokens * 10**9 // step_ns,
            times * estimates.samples * 10**9 // step_ns,
            tuple(table.in_flight(stage) for stage in range(table.num_stages)),
        )


def _parts(reasons: PipelineReasons) -> RenderableType:
    before = (-1, *(part.stage for part in reasons.parts))
    table = new_table(
        ("stage", "module"),
        ("number", "forward", "backward", "each", "share"),
        (
            (
                str(part.stage) if part.stage != stage else "",
                name_text(part.module),
                str(part.count),
                format_ns(part.forward_ns),
                format_ns(part.backward_ns),
                format_ns((part.forward_ns + part.backward_ns) / part.count),
                format_percent(part.share),
            )
            for part, stage in zip(reasons.parts[:_MAX_ROWS], before, strict=False)
        ),
    )
    return with_rest(table, len(reasons.parts), _MAX_ROWS)


def _more(ns: int, of_ns: int) -> str:
    return f"{100 * (ns - of_ns) / max(1, of_ns):+.3g} %"


def _cuts(reasons: PipelineReasons) -> RenderableType:
    even = (
        "with the same work shared evenly among the stages, the step would take "
        f"{format_ns(reasons.even_ns)} ({_more(reasons.even_ns, reasons.step_ns)})"
    )
    if not reasons.moved:
        return Text(f"{even}; of other cuts the plan says nothing")
    rows = (
        (
            name_text(each.module),
            f"stage {each.loses}",
            f"stage {each.gains}",
            format_ns(each.step_ns),
            _more(each.step_ns, reasons.step_ns),
            format_bytes(each.memory_bytes)
            + ", too much" * (each.memory_bytes > each.memory_limit_bytes),
        )
        for each in reasons.moved[:_MAX_ROWS]
    )
    table = new_table(("moved", "from", "to"), ("step, about", "", "memory there, about"), rows)
    note = Text(
        "with the times that such modules have in these stages, which a search would plan anew"
    )
    return Group(Text(even), with_rest(table, len(reasons.moved), _MAX_ROWS), note)


def _waiting(reasons: PipelineReasons) -> RenderableType:
    smaller = Text(
        "the same batch in more, smaller microbatches is another plan (--microbatches): what a "
        "part of the rows takes does not follow from this one"
    )
    if not reasons.batches:
        return smaller
    unit = "samples" if reasons.batches[0].samples_per_s else "tokens"
    table = new_table(
        (f"microbatches ({reasons.microbatches} now), all of the same size",),
        ("step", "bubble", f"{unit}/s", "most in flight"),
        (
            (
                f"{each.microbatches}, {each.microbatches // reasons.microbatches} times the batch",
                format_ns(each.step_ns),
                format_percent(each.bubble),
                f"{rate:,}" if (rate := each.tokens_per_s or each.samples_per_s) else "",
                str(max(each.in_flight)),
            )
            for each in reasons.batches
        ),
    )
    return Group(table, smaller)


def _held(stages: Sequence[StageRow]) -> RenderableType:
    return new_table(
        ("stage",),
        ("in flight", "saved for each", "for all", "memory", "limit", "of the limit"),
        (
            (
                str(row.stage),
                str(row.in_flight),
                format_bytes(row.saved_bytes // max(1, row.in_flight)),
                format_bytes(row.saved_bytes),
                format_bytes(row.memory_bytes),
                format_bytes(row.memory_limit_bytes),
                format_share(row.memory_bytes, row.memory_limit_bytes),
            )
            for row in stages
        ),
    )
