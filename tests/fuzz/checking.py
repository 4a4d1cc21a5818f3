"""Whether a drawn model computes on every mesh, under any plan, what it computes alone."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import msgspec
import torch
from hypothesis import reject
from torch import nn

from autopar.compile import ModelCall, rewritten
from autopar.driver.verify import compare_program, eager
from autopar.errors import MicrobatchError, StageError, UnknownOpWarning
from autopar.ir.graph import Node, Phase, Role
from autopar.ir.input_sharding import with_input_shardings
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_stages
from autopar.ir.sharding import InputSharding, Sharding
from autopar.plans.pipeline_orders import IN_CHUNKS, SCHEDULES, STAGES_PER_RANK
from autopar.plans.plan import Plan
from autopar.runtime.program.program import Program as Step
from autopar.runtime.simulator.differences import differences
from autopar.tracer import Traced, trace
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.fuzz.drawn import SENT, Drawn, On, facts_of_model, facts_of_plan
from tests.fuzz.programs import Program
from tests.layouts import compiled_from, simulated
from tests.planned import plan_for
from tests.redone import redecided
from tests.report.plans import Order, in_order
from tests.zoo.staging import any_table

TOLERANCE = 1e-9
NUDGE = 1e-12
ILL_CONDITIONED = 1e-8
"""A model whose results move this far when what goes in moves by `NUDGE` amplifies rounding: what
differs there proves nothing."""


def check(program: Program, places: Sequence[On]) -> Drawn:
    """AssertionError or VerificationError where a step on one of `places` is not eager's."""
    model, args = program.build()
    traced = traced_model(model, args, program.through_all)
    if not is_sound(model, args, traced):
        reject()
    plans = [check_plan(traced, model, args, place) for place in places]
    plans[0] |= check_stages(traced, model, args, places[0])
    # What is sent nowhere is what eager computes, whatever the compiler does.
    if not any(facts & SENT for facts in plans):
        reject()
    return Drawn(facts_of_model(program, traced, places), plans)


def traced_model(model: nn.Module, args: tuple[Any, ...], through_all: bool = False) -> Traced:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOpWarning)
        return trace(model, args, selects=lambda *_: through_all)


def check_plan(traced: Traced, model: nn.Module, args: tuple[Any, ...], place: On) -> set[str]:
    """What the plan did."""
    if place.local:
        handed = InputSharding(Sharding.parse("[S(0)]"), (prod(place.sizes),))
        rows = {str(i): handed for i in range(len(args))}
        traced = replace(traced, graph=with_input_shardings(traced.graph, rows))
    if place.seed is None:
        plan = plan_for(traced.graph, "x".join(map(str, place.sizes)))
    else:
        plan = random_plan(traced.graph, mesh(*place.sizes), place.seed)
    return facts_of_plan(traced.graph, plan, run(traced, model, args, plan), place)


def check_stages(traced: Traced, model: nn.Module, args: tuple[Any, ...], place: On) -> set[str]:
    """VerificationError if some stages, cut anywhere, under any plans, in the order of any schedule
    are not equal to eager. What is true of them; nothing where the model cannot be cut so."""
    draw = random.Random(place.seed or 0)
    name, ranks, microbatches = (
        draw.choice(list(SCHEDULES)),
        draw.choice((2, 2, 3)),
        draw.choice((1, 2)),
    )
    chunks = STAGES_PER_RANK.get(name, 2 if name in IN_CHUNKS else 1)
    try:
        whole = in_microbatches(traced.graph, microbatches)
    except MicrobatchError:
        whole, microbatches = traced.graph, 1
    starts = [n.index for n in whole.nodes if _is_forward_op(n)][1:]
    if len(starts) < ranks * chunks - 1:
        ranks, chunks, name = 2, 1, "1f1b"
    if not starts:
        return set()
    order = Order(f"{name}:{chunks}" if name in IN_CHUNKS else name, microbatches)
    table = order.actions(ranks)
    is_own = microbatches > 1 and draw.choice((False, True))
    if is_own:
        table = any_table(table.ranks, microbatches, draw.randrange(10**6), is_split=table.is_split)
        order = Order("table", microbatches, tuple(str(table).splitlines()))
    try:
        graphs = in_stages(whole, sorted(draw.sample(starts, ranks * chunks - 1)))
    except StageError:
        return set()
    # Of a mesh with several axes every other rank has but the first in every other case.
    few = place.sizes[: 1 + (place.seed or 0) % 2]
    sizes = [few if table.ranks[k] % 2 else place.sizes for k in range(len(graphs))]
    firsts = [sum(prod(few if r % 2 else place.sizes) for r in range(n)) for n in range(ranks)]
    plans = [
        random_plan(graph, mesh(*own), draw.randrange(10**6), microbatches=microbatches,
                    is_split=table.is_split)
        for graph, own in zip(graphs, sizes, strict=True)
    ]  # fmt: skip
    steps = [simulated(traced, p.structure.only, g) for p, g in zip(plans, graphs, strict=True)]
    stages = tuple(
        msgspec.structs.replace(plan.structure.only, first_rank=firsts[table.ranks[k]])
        for k, plan in enumerate(plans)
    )
    structure = redecided(plans[0].structure, stages=stages)
    planned = in_order(msgspec.structs.replace(plans[0], structure=structure), order)
    compare_program(
        compiled_from(traced, planned, steps), ModelCall(model, args, {}), tolerance=TOLERANCE
    ).check()
    true = {
        "in stages": True,
        "stages in microbatches": microbatches > 1,
        "several stages of a rank": chunks > 1,
        "stages with two backwards": table.is_split,
        "stages in any order": is_own,
    }
    return {fact for fact, is_true in true.items() if is_true}


def _is_forward_op(node: Node) -> bool:
    return node.role is Role.OP and node.phase is Phase.FORWARD and not node.view


def run(traced: Traced, model: nn.Module, args: tuple[Any, ...], plan: Plan) -> Step:
    """What `plan` is made into; VerificationError if it is not equal to eager."""
    compiled = rewritten(traced, plan)
    compare_program(
        compiled,
        ModelCall(model, args, {}),
        tolerance=TOLERANCE,
    ).check()
    return compiled.program


def is_sound(model: nn.Module, args: tuple[Any, ...], traced: Traced) -> bool:
    """Whether eager can differentiate the model, and its results are finite and well-conditioned"""
    nudged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for state in (*nudged.parameters(), *nudged.buffers()):
            if not state.is_floating_point():
                continue
            noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
            state.mul_(1 + NUDGE * noise)
    try:
        first, second = (eager(traced, ModelCall(each, args, {})) for each in (model, nudged))
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return False
        raise
    values = first.named().values()
    finite = all(bool(x.isfinite().all()) for x in values)
    return finite and all(d.relative <= ILL_CONDITIONED for d in differences(second, first))
