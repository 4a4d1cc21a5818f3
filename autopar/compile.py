"""The five calls: trace, price, solve, make a plan, generate. Everything meets here.

`plan` ends with the plan. `compile` hands the model out to the ranks; at the first call of what it
returns, rank 0 plans, every rank receives the plan, and all make sure that they hold the same one
before the program sends anything.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from autopar.asked import Asked
from autopar.cluster import parse_cluster
from autopar.codegen import bind, generate
from autopar.constraints import Forbidden, Pins
from autopar.cost_model.measured import device_from_profile
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, NotImposedWarning
from autopar.fingerprint import fingerprint
from autopar.fit import (
    check_cluster,
    check_fit,
    check_params,
    check_world,
    planned_kind,
    undivided_batch,
)
from autopar.graph import Graph, Role
from autopar.handed import with_handed
from autopar.margin import search_with_margin
from autopar.matching import settle
from autopar.mesh import Cluster
from autopar.options import Options, make_options
from autopar.plan import Plan, mesh_text
from autopar.profile_file import Profile
from autopar.runtime import backend as backends
from autopar.runtime import params
from autopar.runtime.agreement import Agreement, make_agreement
from autopar.runtime.aliases import aliases
from autopar.runtime.binding import detached_places, input_pieces, make_step, results
from autopar.runtime.building import split_inputs
from autopar.runtime.digests import digest_params, digest_values, param_types
from autopar.runtime.doors import flatten
from autopar.runtime.inputs import Inputs, check_inputs
from autopar.runtime.module import CompiledModule, Executable, Runner, Signature
from autopar.runtime.program import Program
from autopar.runtime.progress import Progress
from autopar.runtime.random import SharedRandom, draws
from autopar.runtime.weights import Sources, find_sources
from autopar.runtime.world import (
    Groups,
    World,
    device_of,
    join,
    look,
    make_groups,
    param_placements,
)
from autopar.search import search, summary
from autopar.sharding import Sharding
from autopar.tracer import Traced, trace
from autopar.version import __version__

_BATCH = "batch (all ranks must be handed the same global one)"


def compile(
    model: nn.Module,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    cluster: Cluster | str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    mesh: str = "auto",
    optimizer: str = "adamw",
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    backend: str | None = None,
    strict: bool = False,
    weights: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    inputs: Inputs = "global",
    pins: Pins = (),
    forbid: Forbidden = (),
    strategy: str = "",
) -> CompiledModule:
    """The model, to be trained by all processes of a torchrun (or by this one, if it is alone).

    Every rank is to call it. Parameters become DTensors under their names, with the values of rank
    0; with one process they stay as they are. The first call of the result plans; with `plan`, a
    Plan or the path of one, it applies that instead.

    With `inputs="global"` every rank passes the same global batch; with "local" each passes its
    piece of it along dim 0, in order of rank. A mapping says which of them for each argument.

    `weights`, a safetensors file or a directory of them, has the values of parameters and
    persistent buffers; each rank reads its shards alone. With `seed`, what is on the meta device is
    initialised as the model's modules do it (`runtime.initialise`).

    `cluster` ("2x8xH100", or a TOML file) describes the machines; without it, the devices at hand
    are taken. `profile`, made by `autopar profile`, replaces the ceilings of datasheets. `mesh`,
    `optimizer`, `memory_limit` (bytes, or text such as "72GiB"), `time_limit` in seconds and
    `strict` are as in `Options`. `pins`, `forbid` and `strategy` say what the plan must be like
    (docs/constraints.md). `backend` is "eager" or "inductor"; the default is inductor on
    CUDA devices, eager on the CPU.

    PlanMismatchError if the processes are not as many as the plan or cluster has devices, if the
    plan is for other parameters, or if ranks disagree; ClusterError if the device is unknown;
    WeightsError, before anything is changed, if `weights` do not fit the model, or a parameter on
    the meta device gets no values.
    """
    if isinstance(model, CompiledModule):
        raise AutoparError("the model is compiled already: give autopar.compile the plain model")
    params.check(model)
    check_inputs(inputs, model)
    stored = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    options = make_options(
        mesh, optimizer, memory_limit, time_limit, strict, pins, forbid, strategy
    )
    described = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    kind = described.device.kind if described else planned_kind(stored)
    world = look(device_of(model), kind)
    chosen = backends.choose(backend, world.device)
    if stored is not None:
        check_world(stored.structure, world.size)
        check_params(stored.structure, param_types(model))
    else:
        described = describe_cluster(described or world.cluster, profile)
        check_cluster(described, world.size)
    world = join(device_of(model), kind)
    agreement = make_agreement(world)
    with agreement.telling("the model and the plan"):
        sources = find_sources(model, weights, seed)
    request = Request(stored, described, options, chosen, sources)
    agreement.agree("the model and the plan", request.facts(model))
    params.replicate(model, world, sources)
    builder = Builder(model, world, request, SharedRandom(world.device))
    return CompiledModule(model, Runner(model, world, builder, inputs))


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    cluster: Cluster | str | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    mesh: str = "auto",
    optimizer: str = "adamw",
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    strict: bool = False,
    pins: Pins = (),
    forbid: Forbidden = (),
    strategy: str = "",
    margin: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan for training `model` on `inputs`: a tensor, a tuple of arguments or a mapping
    of keyword arguments, as the whole global batch.

    Nothing is computed: a model on torch's meta device will do, and no device of the cluster is
    needed. The keywords are those of `compile`; with `margin` the plan says how much better it is
    than the best one of another structure (docs/explain.md); `progress` is told what is being done.

    TraceError if the model cannot be captured; InfeasibleError if nothing fits the memory limit.
    """
    options = make_options(
        mesh, optimizer, memory_limit, time_limit, strict, pins, forbid, strategy
    )
    described = describe_cluster(cluster or look(device_of(model)).cluster, profile)
    say: Callable[[str], None] = progress or (lambda _: None)
    say("tracing the model")
    return answer(ask(model, inputs, described, options, margin), say)


def ask(
    model: nn.Module, inputs: Any, cluster: Cluster, options: Options, margin: bool = False
) -> Asked:
    """The model, traced, and all else that decides the plan for it."""
    args, kwargs = split_inputs(inputs)
    traced = trace_for_training(model, args, kwargs, options)
    return Asked(traced.graph, cluster, settled(traced, model, args, kwargs, options), margin)


def answer(asked: Asked, progress: Callable[[str], None]) -> Plan:
    """The best plan, with its margin if that is asked for."""
    return _search(asked.graph, asked.cluster, asked.options, progress, asked.margin)


def trace_for_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Traced:
    """The graph with its backward part wherever a parameter is trained, though the call may be
    under `torch.no_grad`: a model is stored in one way, and training decides which."""
    trained = any(param.requires_grad for param in model.parameters())
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        return trace(model, args, kwargs, strict=options.strict, name=type(model).__name__)


def settled(
    traced: Traced,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Options:
    """`options` with constraints that speak of what `traced` has."""
    known = aliases(model, args, kwargs, traced.out_spec, len(traced.outputs))
    return replace(options, constraints=settle(traced.graph, options.constraints, known))


def _search(
    graph: Graph,
    cluster: Cluster,
    options: Options,
    progress: Callable[[str], None],
    margin: bool = False,
) -> Plan:
    find = search_with_margin if margin else search
    mark, version = fingerprint(graph), str(torch.__version__)
    try:
        return find(
            graph, cluster, options, fingerprint=mark, torch_version=version, progress=progress
        )
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{undivided_batch(graph, cluster.num_devices)}") from error


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked `compile` for."""

    plan: Plan | None
    cluster: Cluster | None
    options: Options
    backend: str
    sources: Sources = field(default_factory=Sources)
    plain: bool = False
    """Parameters stay as they are, whole on every rank: `options` must say so."""

    def facts(self, model: nn.Module) -> dict[str, str]:
        """What ranks compare before the parameters are handed out."""
        return {
            "autopar": __version__,
            "torch": str(torch.__version__),
            "model": type(model).__name__,
            "parameters": digest_params(model),
            "plan": self.plan.digest if self.plan else "none",
            "cluster": self.cluster.name if self.cluster else "none",
            "backend": self.backend,
            "weights": self.sources.digest,
            **{field.name: str(getattr(self.options, field.name)) for field in fields(Options)},
        }


@dataclass(slots=True)
class Builder:
    """Makes the program for a call, on all ranks together."""

    model: nn.Module
    world: World
    request: Request
    random: SharedRandom
    is_first: bool = True
    storage: dict[str, str] = field(default_factory=dict[str, str])
    """How the first program stores each parameter; the others must do the same."""

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        groups: Groups | None,
    ) -> Executable:
        agreement = make_agreement(self.world)
        progress = Progress(quiet=self.world.rank != 0)
        try:
            with agreement.telling("what to compile"):
                progress.phase("trace")
                traced = trace_for_training(self.model, args, kwargs, self.request.options)
                handed = {str(i): text for i, text in enumerate(signature.handed)}
                traced = replace(traced, graph=with_handed(traced.graph, handed))
                mark = fingerprint(traced.graph)
                stored = self._stored(traced, mark)
                values = digest_values(flatten((args, kwargs))[0])
            facts = {"graph of the model": mark, _BATCH: values}
            agreement.agree("what to compile", facts | signature.facts())
            progress.phase("plan")
            plan = stored or self._plan(agreement, traced, args, kwargs, groups, progress)
            with agreement.telling("the plan"):
                progress.phase("rewrite")
                program = generate(traced.gm, traced.graph, plan)
            agreement.agree("the plan", {"plan": plan.digest})
            random = self._random(agreement, program)
            with agreement.telling("the parameters as stored"):
                executable = self._bind(traced, program, plan, groups, random)
            agreement.agree("the parameters as stored", {})
        except BaseException:
            progress.close()
            raise
        self.is_first = False
        name, mesh = plan.structure.model, mesh_text(plan.structure.mesh)
        progress.close(f"{name} on mesh {mesh}: {summary(plan)}; plan {plan.digest[:12]}")
        return executable

    def _stored(self, traced: Traced, mark: str) -> Plan | None:
        """The plan the user gave, if it is for this call; it must be for the first one."""
        plan = self.request.plan
        if plan is not None and self.is_first:
            check_fit(plan.structure, traced.graph, mark)
        return plan if plan is not None and plan.structure.fingerprint == mark else None

    def _plan(
        self,
        agreement: Agreement,
        traced: Traced,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups | None,
        progress: Progress,
    ) -> Plan:
        cluster = self.request.cluster or parse_cluster(self.world.cluster)
        asked = least = self.request.options
        if groups is not None:
            names = [node.target for node in traced.graph.with_role(Role.PARAM)]
            stored = {n: "R" if self.request.plain else self.storage[n] for n in names}
            least = asked.for_stored(mesh_text(groups.axes), stored)

        def work() -> bytes:
            try:
                options = asked if groups is None else asked.joined(least)
                options = settled(traced, self.model, args, kwargs, options)
                return _search(traced.graph, cluster, options, progress).to_bytes()
            except (ConstraintError, InfeasibleError) as error:
                if groups is None or not asked.asked:
                    raise
                warnings.warn(NotImposedWarning(str(error)), stacklevel=2)
                return _search(traced.graph, cluster, least, progress).to_bytes()

        return Plan.from_bytes(agreement.share("plan", work))

    def _bind(
        self,
        traced: Traced,
        program: Program,
        plan: Plan,
        groups: Groups | None,
        random: SharedRandom | None,
    ) -> Executable:
        """The program for this rank; at the first call, the parameters are stored as it says."""
        storage = {
            name: Sharding.parse(param.storage) for name, param in plan.structure.params.items()
        }
        axes, device = plan.structure.mesh, self.world.device
        if self.world.size == 1:
            program = bind(program, {}, axes, (), device)
        else:
            groups = groups or make_groups(axes, self.world)
            program = bind(program, groups.names, axes, groups.coordinate, device)
            if self.is_first and not self.request.plain:
                params.shard(self.model, groups, storage, self.request.sources)
                self.storage = {name: str(sharding) for name, sharding in storage.items()}
        if self.request.plain:
            storage = {}
        return Executable(
            step=make_step(program, self.request.backend),
            plan=plan,
            groups=groups,
            storage={name: param_placements(sharding) for name, sharding in storage.items()},
            pieces=input_pieces(traced.graph, axes),
            results=results(traced.graph, ((leaf.item, leaf.value) for leaf in traced.outputs)),
            out_spec=traced.out_spec,
            detached=detached_places(traced.graph, program, groups),
            random=random,
        )

    def _random(self, agreement: Agreement, program: Program) -> SharedRandom | None:
        if self.world.size == 1 or not draws(program.forward):
            return None
        if not self.random.is_set:
            self.random.set(agreement.share("random state", self.random.default))
        return self.random


def describe_cluster(
    cluster: Cluster | str, profile: Profile | str | os.PathLike[str] | None
) -> Cluster:
    """The cluster, with the ceilings of the profile in place of datasheets."""
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if profile is None:
        return found
    measured = profile if isinstance(profile, Profile) else Profile.load(profile)
    return replace(found, device=device_from_profile(measured, found.device))
