"""What a user calls, on the flow of `autopar.compile`.

`plan` returns a plan, `frontier` several. `compile` distributes the model to the ranks. At the
first call of the result, rank 0 plans and every rank receives the plan. All ranks check that they
hold the same plan before the program sends anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.cluster.mesh_shapes import MeshLike
from autopar.cluster.profile import Profile
from autopar.compile import PlanT, plan_call
from autopar.cost_model.optimizer_kinds import optimizer_name
from autopar.driver.arguments import ClusterLike, read_cluster, read_model, with_checked_options
from autopar.driver.planning import (
    answer,
    call_on,
    check_outputs,
    describe_cluster,
    make_call_request,
)
from autopar.driver.search.frontier import find_frontier
from autopar.driver.training.reporting import report_at_exit
from autopar.driver.training.session import Builder
from autopar.plans.compatibility import (
    check_cluster,
    check_params,
    check_world,
    stored_options,
)
from autopar.plans.frontier import Frontier, read_limits
from autopar.plans.plan import Plan
from autopar.plans.recorded import planned_cluster
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import (
    ConstraintOptions,
    MemoryOptions,
    OutputOptions,
    PipelineOptions,
    SearchOptions,
    options_among,
)
from autopar.plans.requests.read_options import (
    make_options,
    read_options,
    resolve_options,
    unsaid_open,
)
from autopar.plans.requests.request import GraphRequest
from autopar.runtime.checkpoint.weights import find_sources
from autopar.runtime.module import params
from autopar.runtime.module.accelerated import is_accelerated
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.module.runner import Runner
from autopar.runtime.process.agreement import make_agreement
from autopar.runtime.process.digests import param_types
from autopar.runtime.process.inputs import Inputs, check_inputs
from autopar.runtime.process.world import device_of, join, look
from autopar.runtime.program import backend as backends
from autopar.runtime.program.random import DefaultRandom, SharedRandom
from autopar.tracer import Traced


@with_checked_options
def compile(
    model: nn.Module,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    cluster: ClusterLike | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    mesh: MeshLike = "auto",
    optimizer: Any = "adamw",
    microbatches: int | str = "auto",
    backend: str | None = None,
    memory: MemoryOptions | Mapping[str, Any] | None = None,
    pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    constraints: ConstraintOptions | Mapping[str, Any] | None = None,
    outputs: OutputOptions | Mapping[str, Any] | None = None,
    search: SearchOptions | Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    inputs: Inputs | None = None,
    verify: bool = False,
) -> CompiledModule:
    """The model, to be trained by all processes of a torchrun (or by this one, if it is alone).

    Every rank is to call it. Parameters become DTensors under their names, with the values of rank
    0; with one process they stay as they are. The first call of the result plans. With `plan`, a
    Plan or the path of one, it applies that instead: stages, microbatches and chunks that are given
    must be as the plan has them.

    With `inputs="global"` every rank passes the same global batch; with "local" each passes its
    shard of it along dim 0, in order of rank. A mapping says which of them for each argument. The
    default is "global", and "local" once accelerate or Trainer has the model: they give each rank
    rows of its own.

    `weights`, a safetensors file or a directory of them, has the values of parameters and
    persistent buffers; each rank reads its shards alone. With `seed`, what is on the meta device is
    initialised as the model's modules do it (`runtime.initialise`).

    `cluster` is "2x8xH100", a TOML file, a profile, or a number of the local devices; the default
    is all local devices. `profile`, made by `autopar profile`, replaces presets. `mesh` is "2x4",
    (2, 4) or {"dp": 2, "tp": 4}. `optimizer` is a name, or one of `torch.optim`, several, or a
    class (docs/training.md). The batch is split into `microbatches`, one after the other, which
    takes less memory; "auto" finds how many where memory binds (docs/microbatches.md). `backend`
    runs the graphs and decides what is priced: "eager" or "inductor"; the default is inductor on
    CUDA devices, eager on the CPU.

    Options that belong together are a group, as an object (`autopar.MemoryOptions`) or a mapping:

    - `memory`: the `limit` of a device and the memory of a `host`, which its devices share, in
      bytes, or as text such as "72GiB". The `residency` of parameters is "cuda", "cpu" or "auto";
      the default is "cuda", or "auto" if nothing fits otherwise (docs/residency.md). A `checkpoint`
      of the model is "planned", or recomputed "as written". A loss is computed in `loss_chunks`
      (docs/loss-chunks.md). `saved_dtype` is the dtype in which activations of float32 are saved;
      it rounds gradients.
    - `pipeline`: how many `stages`, the modules that they begin with (`cuts`) and their `schedule`
      (docs/pipeline.md). By default there are several stages if one would wait or does not fit in
      memory, and no mesh, microbatches or shardings are given. There is one stage if ranks have
      rows of their own.
    - `constraints`: `pins`, `forbid` and `strategy` say what the plan must be like
      (docs/constraints.md).
    - `outputs`: those that are `differentiable`, through which a backward goes beside the losses.
      It is planned from the start, and not only at the first such backward. Outputs that are
      `unread` while the model trains are None then, and are not computed.
    - `search`: its `work_limit` (about CPU seconds, but counted), the `time_limit` of each solve
      (seconds, or "2min"), whether the plan says its `margin`, and whether an op without a rule is
      an error (`strict`).

    docs/options.md has all of them. With `verify`, each program is compared with eager on the batch
    it is made for, before it is used. Rank 0 runs all ranks and eager on its CPU, and needs memory
    for a few whole models and steps there.

    ArgumentError if an argument is of no known kind, or contradicts `plan`. PlanMismatchError if
    the plan or cluster has another number of devices than there are processes, if the plan is for
    other parameters, or if ranks disagree. ClusterError if the device is unknown. WeightsError,
    before anything is changed, if `weights` do not fit the model, or a parameter on the meta device
    gets no values. With `verify` the first call raises VerificationError if its program is not
    equal to eager.
    """
    given = options_among(locals())
    model = read_model(model)
    params.check_model(model)
    check_inputs(inputs or "global", model)
    stored = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    described = read_cluster(cluster, model)
    requested = read_options(**given | {"optimizer": optimizer_name(optimizer, model)})
    if stored is None:
        options = resolve_options(requested)
    else:
        # For calls other than the stored plan's: options that are not given are as in that plan.
        options = stored_options(resolve_options(unsaid_open(requested)), stored.structure)
    planned_for = described or planned_cluster(stored)
    kind = planned_for.device.kind if planned_for else None
    world = look(device_of(model), kind)
    chosen = backends.choose(backend, world.device)
    if stored is not None:
        check_world(stored.structure, world.size)
        check_params(stored.structure, param_types(model))
    elif described is not None:
        described = describe_cluster(described, profile)
        check_cluster(described, world.size)
    world = join(device_of(model), kind)
    agreement = make_agreement(world)
    kinds = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    is_alike = "local" not in kinds
    random = DefaultRandom(world.device) if is_alike else SharedRandom(world.device)
    with world.working("compilation"):
        with agreement.telling("the model and the plan"):
            if stored is None and described is None:
                described = describe_cluster(world.cluster, profile)
            elif planned_for is not None:
                world.check_nodes(planned_for)
            sources = find_sources(model, weights, seed)
            builder = Builder(
                model, world, random, stored, described, options, chosen, sources, verify=verify
            )
        agreement.agree("the model and the plan", builder.facts())
        params.replicate(model, world, sources)
        if is_alike and world.pre_step_check is not None and not is_accelerated():
            world.pre_step_check.draw_alike()
    compiled = CompiledModule(model, Runner(model, world, builder, inputs, with_values=verify))
    report_at_exit(compiled)
    return compiled


@with_checked_options
def plan(
    model: nn.Module,
    inputs: Any,
    *,
    cluster: ClusterLike | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    mesh: MeshLike = "auto",
    optimizer: Any = "adamw",
    microbatches: int | str = "auto",
    backend: str | None = None,
    memory: MemoryOptions | Mapping[str, Any] | None = None,
    pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    constraints: ConstraintOptions | Mapping[str, Any] | None = None,
    outputs: OutputOptions | Mapping[str, Any] | None = None,
    search: SearchOptions | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan for training `model` on `inputs`: a tensor, a tuple of arguments or a mapping
    of keyword arguments, as the whole global batch.

    Nothing is computed: a model on torch's meta device will do, and no device of the cluster is
    needed. The keywords are those of `compile`; `progress` is called with each line of progress.
    Ctrl-C ends the search with the best plan so far, if there is one (`InterruptedSearchWarning`).

    TraceError if the model cannot be captured; InfeasibleError if nothing fits the memory limit.
    """
    given = options_among(locals())
    say: Callable[[str], None] = progress or (lambda _: None)
    model = read_model(model)
    options = make_options(**given | {"optimizer": optimizer_name(optimizer, model)})
    return _on_traced(
        model,
        inputs,
        cluster,
        profile,
        options,
        say,
        lambda graph_request: answer(graph_request, say, stops=True),
    )


@with_checked_options
def frontier(
    model: nn.Module,
    inputs: Any,
    *,
    limits: str | Sequence[float | str] = (),
    cluster: ClusterLike | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    mesh: MeshLike = "auto",
    optimizer: Any = "adamw",
    microbatches: int | str = "auto",
    backend: str | None = None,
    memory: MemoryOptions | Mapping[str, Any] | None = None,
    pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    constraints: ConstraintOptions | Mapping[str, Any] | None = None,
    outputs: OutputOptions | Mapping[str, Any] | None = None,
    search: SearchOptions | Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Frontier:
    """Time against memory: the best plan within each of `limits` per device ("80,40,24GiB", or
    bytes and texts). The default is about eight limits, from the peak of the best plan of all down
    to that of the smallest-memory plan (docs/frontier.md). The step is never longer for more
    memory.

    All else is as for `plan`, in one stage by default. The frontier says whether the `memory`
    limit, or else the memory of the device, suffices. A time limit is for each plan.

    TraceError if the model cannot be captured; a limit that nothing fits is a point without a plan.
    """
    given = options_among(locals())
    say: Callable[[str], None] = progress or (lambda _: None)
    rungs = read_limits(limits)
    model = read_model(model)
    options = make_options(**given | {"optimizer": optimizer_name(optimizer, model)})
    options = replace(options, stages_if_needed=False, residency_if_needed=False)
    return _on_traced(
        model, inputs, cluster, profile, options, say,
        lambda graph_request: find_frontier(graph_request, rungs, say),
    )  # fmt: skip


def _on_traced(
    model: nn.Module,
    inputs: Any,
    cluster: ClusterLike | None,
    profile: Profile | str | os.PathLike[str] | None,
    options: Options,
    say: Callable[[str], None],
    find: Callable[[GraphRequest], PlanT],
) -> PlanT:
    """What `find` returns for a call of `model`, traced once."""
    at_hand = read_cluster(cluster, model)
    described = describe_cluster(at_hand or look(device_of(model)).cluster, profile)
    call = call_on(model, inputs, options)

    def find_for(traced: Traced) -> PlanT:
        check_outputs(traced, options)
        return find(make_call_request(call, traced, described))

    say("tracing the model")
    return plan_call(call, find_for)[1]
