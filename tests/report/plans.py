"""Plans written by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.cluster_rates import ClusterRates, CollectiveRates, LinkRates
from autopar.plans.estimates import (
    CollectiveTotal,
    Delay,
    Held,
    Memory,
    MemoryCurve,
    MicrobatchTimes,
    OpTotal,
    Shared,
    StageEstimates,
    of_one_stage,
)
from autopar.plans.order import OPTIMIZER, Run
from autopar.plans.pipeline_orders import named_schedule
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import SCHEMA_VERSION, Plan
from autopar.plans.provenance import CandidateOutcome, Margin, Provenance
from autopar.plans.structure import MeshAxis, Param, Stage, Structure
from tests.redone import redecided, repriced

MS = 10**6
MIB = 2**20


NO_STEP = {
    "exposed_communication_ns": 0,
    "hidden_communication_ns": 0,
    "host_ns": 0,
    "exposed_host_ns": 0,
    "hidden": {},
    "contention": {},
    "bubble_ns": 0,
    "tokens": 0,
    "tokens_per_s": 0,
    "mfu_ppm": 0,
    "cluster": ClusterRates("A100", "datasheet", 80 << 30, 10**12, {}, {}, ()),
    "sends": {},
    "order": (),
    "memory_curve": MemoryCurve(),
    "peak_holders": (),
}
"""Fields of `StageEstimates` for plans that say nothing of when their step does what."""


def with_stage(plan: Plan, **changed: Any) -> Plan:
    """A plan of one stage with other decisions for it."""
    return msgspec.structs.replace(plan, structure=redecided(plan.structure, **changed))


def with_estimates(plan: Plan, **changed: Any) -> Plan:
    """A plan of one stage with other estimates of it."""
    return msgspec.structs.replace(plan, estimates=repriced(plan.estimates, **changed))


def undisturbed(plan: Plan) -> Plan:
    """The plan where device and links do not slow each other down: all takes what the bill says."""
    return with_estimates(plan, contention={})


def _op(
    module: str, phase: str, compute: int, comm: int = 0, saved: int = 0, n: int = 4
) -> OpTotal:
    return OpTotal(module, "aten.mm.default", phase, n, compute * MS, comm * MS, saved * MIB, 0)


def two_axis_plan() -> Plan:
    """Four blocks on two axes; the first block's down projection is sharded another way. A third
    of what is sent is hidden."""
    up = Param((256, 1024), "bfloat16", "[S(0), S(1)]", "[R, S(1)]")
    down = Param((1024, 256), "bfloat16", "[R, S(0)]", "[R, S(0)]")
    params = {f"model.layers.{i}.mlp.up.weight": up for i in range(4)}
    params |= {f"model.layers.{i}.mlp.down.weight": down for i in range(1, 4)}
    params["model.layers.0.mlp.down.weight"] = Param((1024, 256), "bfloat16", "[R, R]", "[R, R]")
    params["lm_head.weight"] = Param((256, 4097), "bfloat16", "[S(1), S(1)]", "[S(1), S(1)]")
    stage = Stage(
        axes=(MeshAxis("dp", 2), MeshAxis("tp", 4)),
        params=params,
        ops={"model.layers.*.mlp.up/mm": "b,n"},
        outputs={},
        routes={"model.layers.*.mlp.down/mm@forward": ("[S(0), P] -> [S(0), R]",)},
        replicated_unknown_ops=("mylib.twist.default",),
    )
    return Plan(
        SCHEMA_VERSION,
        Structure(
            model="Toy",
            fingerprint="f" * 32,
            cluster="2x4xA100",
            optimizer="adamw",
            inputs=("input_ids: int64[8, 128]",),
            stages=(stage,),
        ),
        of_one_stage(
            StageEstimates(
                step_ns=31 * MS,
                compute_ns=21 * MS,
                communication_ns=9 * MS,
                optimizer_ns=4 * MS,
                flops=10**12,
                memory=Memory(4 * MIB, 4 * MIB, 16 * MIB, MIB, 12 * MIB, 3 * MIB),
                memory_limit=50 * MIB,
                collectives=(
                    CollectiveTotal("all_gather", "dp", "forward", 4, 2 * MIB, 1 * MS),
                    CollectiveTotal("all_reduce", "tp", "forward", 4, 8 * MIB, 3 * MS),
                    CollectiveTotal("all_reduce", "tp", "backward", 4, 8 * MIB, 5 * MS),
                ),
                ops={
                    "model.layers.*.mlp.up/mm": _op("model.layers.*.mlp.up", "forward", 4, saved=4),
                    "model.layers.*.mlp.down/mm": _op(
                        "model.layers.*.mlp.down", "forward", 3, 3, 8
                    ),
                    "model.layers.*.mlp.down/mm_b": _op(
                        "model.layers.*.mlp.down", "backward", 6, 5
                    ),
                    "model.layers.*.norm/mul": _op("model.layers.*.norm", "forward", 1),
                    "lm_head/mm": _op("lm_head", "forward", 2, 1, n=1),
                    "lm_head/mm_b": _op("lm_head", "backward", 4, n=1),
                    "loss": _op("", "forward", 1, n=1),
                    "param:up": OpTotal("model.layers.*.mlp.up", "", "forward", 0, 0, 0, 0, 4 * MS),
                },
                **NO_STEP | {"exposed_communication_ns": 6 * MS, "hidden_communication_ns": 3 * MS},
            )
        ),
        Provenance(
            autopar="0.1.0",
            torch="2.13.0",
            solver="HiGHS 1.15.1",
            status="feasible",
            objective_ns=34 * MS,
            bound_ns=33 * MS,
            gap_ppm=29412,
            candidates=(
                CandidateOutcome("mesh dp=8", "planned", 34 * MS),
                CandidateOutcome("mesh dp=2,tp=4", "not better", 36 * MS),
            ),
        ),
    )


def stepped_plan() -> Plan:
    """`two_axis_plan` with all that a plan says of its step: order, sends, memory over time. A
    block reads what the one before it made; its second half redistributes what it reads. Nothing is
    hidden."""
    plan = two_axis_plan()
    estimates, block = plan.estimates, "model.layers.*"
    up, down, back = (f"{block}.mlp.{name}" for name in ("up/mm", "down/mm", "down/mm_b"))
    half, full, partial = "[S(0), S(1)]", "[S(0), R]", "[S(0), P]"
    between = {
        up: ((f"param:{block}.mlp.up.weight", "[R, S(1)]"), (down, full)),
        down: ((up, half), (f"{block}.norm/mul", full)),
        back: ((down, half),),
    }
    makes = {up: half, down: partial, back: full, f"{block}.norm/mul": full}
    ops = {
        key: msgspec.structs.replace(
            op,
            inputs=between.get(key, ()),
            outputs=((("bfloat16[8, 1024]", makes[key]),) if key in makes else ()),
        )
        for key, op in estimates.stages[0].ops.items()
    }
    gathered = CollectiveTotal("all_gather", "dp", "forward", 4, 2 * MIB, 1 * MS)
    reduced = CollectiveTotal("all_reduce", "tp", "forward", 4, 8 * MIB, 3 * MS + 1)
    backward = CollectiveTotal("all_reduce", "tp", "backward", 4, 8 * MIB, 5 * MS - 1)
    weight = f"param:{block}.mlp.up.weight@forward"
    forward = (*sent(weight), f"{block}.norm/mul", up, down, *sent(f"{down}@forward"))
    return msgspec.structs.replace(
        plan,
        estimates=repriced(
            estimates,
            ops=ops,
            step_ns=34 * MS,
            exposed_communication_ns=9 * MS,
            hidden_communication_ns=0,
            hidden={},
            contention={},
            tokens=1024,
            tokens_per_s=30_117,
            mfu_ppm=312_345,
            sends={
                weight: (gathered,),
                f"{down}@forward": (reduced,),
                f"{back}@backward": (backward,),
            },
            order=(
                Run(4, forward),
                Run(1, ("lm_head/mm", "loss", "lm_head/mm_b")),
                Run(4, (back, *sent(f"{back}@backward"))),
                Run(1, (OPTIMIZER,)),
            ),
            memory_curve=MemoryCurve(
                time_ns=(10 * MS, 20 * MS, 34 * MS),
                unsharded=(0, MIB, 0),
                saved=(6 * MIB, 12 * MIB, MIB),
                transient=(MIB, 3 * MIB, 2 * MIB),
            ),
            peak_holders=(Held(down, partial, "saved", 4, 8 * MIB),),
        ),
        provenance=msgspec.structs.replace(
            plan.provenance,
            margin=Margin(34 * MS + 10_000, 34 * MS + 10_000, "shards the sequence on tp"),
        ),
    )


def half_hidden_plan() -> Plan:
    """`stepped_plan` where gradients are waited for when all blocks are over: each takes 5/4 ms,
    and the next block computes for 6/4, so that only the last is exposed."""
    plan = stepped_plan()
    hidden_ns = 3 * (5 * MS - 1) // 4
    forward, head, backward, update = plan.estimates.stages[0].order
    back, start, wait = backward.items
    return with_estimates(
        plan,
        step_ns=plan.estimates.step_ns - hidden_ns,
        exposed_communication_ns=plan.estimates.exposed_communication_ns - hidden_ns,
        hidden_communication_ns=hidden_ns,
        order=(forward, head, Run(4, (back, start)), Run(4, (wait,)), update),
    )


class Order(NamedTuple):
    """In which order ranks work on how many microbatches: of a schedule, or of a table."""

    schedule: str = "1f1b"
    microbatches: int = 2
    table: tuple[str, ...] = ()

    def actions(self, ranks: int) -> PipelineSchedule:
        """What each of so many ranks does."""
        if self.table:
            return PipelineSchedule.parse("\n".join(self.table))
        return named_schedule(self.schedule, ranks, self.microbatches)


def staged_plan(order: Order = Order(), ranks: int = 2) -> Plan:  # noqa: B008
    """Stages of four layers on eight devices each, of which every second takes twice as long; as
    many as the schedule, 1F1B of two microbatches, has. Messages take 5 ms. In two stages a step is
    165 ms, of which the second rank works for 125."""
    replace = msgspec.structs.replace
    one, actions = stepped_plan(), order.actions(ranks)
    schedule, microbatches, table = order
    alone, its = one.structure.only, one.estimates.stages[0]
    ops = {key: replace(op, count=microbatches * op.count) for key, op in its.ops.items()}
    stages: list[Stage] = []
    each: list[StageEstimates] = []
    for k in range(actions.num_stages):
        params = {
            name.replace(f".{i}.", f".{i + 4 * k}."): param
            for name, param in alone.params.items()
            for i in range(4)
            if f".{i}." in name
        }
        if k == actions.num_stages - 1:
            params["lm_head.weight"] = alone.params["lm_head.weight"]
        start, first_rank = f"model.layers.{4 * k}" if k else "", 8 * actions.ranks[k]
        stages.append(
            replace(
                alone, params=params, start=start, first_rank=first_rank,
                microbatches=microbatches, is_split=actions.is_split,
            )
        )  # fmt: skip
        ns = 10 * MS * (1 + k % 2)
        microbatch = MicrobatchTimes(ns, 2 * ns, ns, 2 * ns, 5 * MS, *[ns] * (2 * actions.is_split))
        own = {
            "step_ns": 6 * ns + 5 * MS,
            "memory": replace(its.memory, transient=(3 + k) * MIB),
        }
        each.append(replace(its, microbatch=microbatch, ops=ops, **own))
    hops = [(k, k + 1, "forward") for k in range(len(stages) - 1)]
    hops += [(b, a, "backward") for a, b, _ in hops]
    busy_ns = max(
        sum(each[s].step_ns for s in actions.ranks if actions.ranks[s] == r) for r in range(ranks)
    )
    delays = tuple(Delay(*hop, MIB, 5 * MS if ranks > 1 else 0) for hop in sorted(hops))
    shared = (Shared("results", tuple(range(ranks)), 1, 4, 2 * MS),) if ranks > 1 else ()
    step_ns = simulate_pipeline(actions, each, delays, shared).step_ns
    estimates = replace(
        one.estimates, stages=tuple(each), delays=delays, shared=shared, step_ns=step_ns,
        bubble_ns=step_ns - busy_ns - sum(s.time_ns for s in shared), memory=each[-1].memory,
    )  # fmt: skip
    structure = replace(one.structure, stages=tuple(stages), schedule=schedule, schedule_rows=table)
    return replace(one, structure=structure, estimates=estimates)


def in_order(plan: Plan, order: Order) -> Plan:
    """The plan with another order of microbatches."""
    replace = msgspec.structs.replace
    schedule, count, table = order
    stages = tuple(replace(stage, microbatches=count) for stage in plan.structure.stages)
    structure = replace(plan.structure, stages=stages, schedule=schedule, schedule_rows=table)
    return replace(plan, structure=structure)


def sent(key: str) -> tuple[str, str]:
    """The items of a tensor that is sent on its own, and waited for at once."""
    return f"start 0 {key}", f"wait 0 {key}"


def renamed(plan: Plan, name: str) -> Plan:
    """`plan` with `name` in the place of every name that a file can hold."""
    structure, estimates = plan.structure, plan.estimates.stages[0]
    param = next(iter(structure.params.values()))
    return msgspec.structs.replace(
        plan,
        structure=msgspec.structs.replace(
            structure,
            model=name,
            cluster=name,
            optimizer=name,
            inputs=(name,),
            stages=(
                msgspec.structs.replace(
                    structure.only,
                    axes=(MeshAxis(name, 2), MeshAxis("tp", 4)),
                    params={name: param, f"{name}.0.w": param, f"{name}.1.w": param},
                    replicated_unknown_ops=(name,),
                    ops={f"{name}.x": name},
                    outputs={name: name},
                    saved={name: name},
                    routes={f"{name}@{name}": (name,)},
                ),
            ),
        ),
        estimates=of_one_stage(
            msgspec.structs.replace(
                estimates,
                ops={
                    "x": OpTotal(
                        name, name, "forward", 2, 4, 1, 1, 1, ((name, name),), ((name, name),)
                    ),
                    f"{name}.x": OpTotal(
                        f"{name}.0", name, "forward", 2, 4, 1, 1, 1, (("x", name),), ((name, name),)
                    ),
                },
                collectives=(CollectiveTotal(name, name, name, 1, 1, 1),),
                sends={f"{name}@{name}": (CollectiveTotal(name, name, name, 1, 1, 1),)},
                order=(Run(2, ("x", f"{name}.x", *sent(f"{name}@{name}"))), Run(1, (OPTIMIZER,))),
                memory_curve=MemoryCurve((1, 2), (1, 1), (1, 2), (3, 4)),
                peak_holders=(Held(name, name, name, 1, 1),),
                cluster=ClusterRates(
                    name,
                    name,
                    1,
                    1,
                    {name: 1},
                    {name: 1},
                    (LinkRates(name, 1, 1, 1, 1, 1, (CollectiveRates(name, 1, 1, 1, 1),)),),
                ),
            )
        ),
        provenance=msgspec.structs.replace(
            plan.provenance,
            status=name,
            solver=name,
            torch=name,
            autopar=name,
            imposed=(name,),
            candidates=(
                CandidateOutcome(name, "infeasible", None, name),
                CandidateOutcome(name, "skipped"),
            ),
            margin=Margin(1, None, name),
        ),
    )
