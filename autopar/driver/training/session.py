"""The session of a training process: how all ranks together build the program for a call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from autopar.cluster.parsing import parse_cluster
from autopar.compile import Compiled, ModelCall, compile_call
from autopar.driver.planning import answer, check_outputs, make_call_request, planned_gradients
from autopar.driver.search.meshes import summary
from autopar.driver.search.open_counts import dividing
from autopar.driver.training.binding import (
    AllGroups,
    bound_step,
    check_holders,
    check_stored,
    make_all_groups,
    stored_places,
)
from autopar.driver.training.progress import StepProgress
from autopar.driver.verify import check_call
from autopar.errors import (
    AutoparError,
    ConstraintError,
    InfeasibleError,
    NotImposedWarning,
    UndividedBatchError,
)
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Role
from autopar.ir.input_sharding import with_input_shardings
from autopar.ir.mesh import Cluster
from autopar.ir.sharding import InputSharding, Sharding
from autopar.ir.version import __version__
from autopar.plans.compatibility import check_fit
from autopar.plans.layout import starts_in
from autopar.plans.plan import Plan
from autopar.plans.requests.constraints import Constraint
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import option_fields, value_of
from autopar.plans.requests.strategies import STORAGE
from autopar.plans.structure import Structure
from autopar.runtime.checkpoint.weights import Sources
from autopar.runtime.module import params
from autopar.runtime.module.executable import Executable, Signature, external_tensors
from autopar.runtime.process.agreement import Agreement, make_agreement
from autopar.runtime.process.digests import BATCH, digest_params, digest_values, modes
from autopar.runtime.process.stage_groups import StageGroups
from autopar.runtime.process.world import ParamPlace, World
from autopar.runtime.program.binding import results, row_results, sequence_results, sharded_inputs
from autopar.runtime.program.externals import share_constants, share_externals
from autopar.runtime.program.meter import Meter
from autopar.runtime.program.program import Program
from autopar.runtime.program.random import DefaultRandom, SharedRandom, draws
from autopar.runtime.torch_private import flatten
from autopar.tracer import Traced, only_losses

_NEW = "parameters that are new to the model"
_TOPICS = {"trace": "what to compile", "rewrite": "the plan"}
"""What ranks agree on after a stage of the flow."""


@dataclass(slots=True)
class ModelFamily:
    """What a model and its copies share. The first program of any of them decides how the
    parameters of all are stored. An optimizer that averages models thus finds equal shards."""

    models: list[ref[nn.Module]]
    is_first: bool = True
    groups: AllGroups | None = None
    storage: dict[str, Sharding] = field(default_factory=dict[str, Sharding])
    """How the first program stores each parameter; the others must do the same."""
    places: Mapping[str, ParamPlace] = field(default_factory=dict[str, ParamPlace])
    """Where each parameter is stored."""
    params_on_host: tuple[str, ...] = ()
    """The parameters that live on the host."""
    structure: Structure | None = None
    """The decisions for the first program."""
    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    """The plans so far, by the fingerprint of their graph."""


@dataclass(slots=True)
class Builder:
    """Builds the program for a call, on all ranks together, by the options of `compile`: under a
    stored `plan`, or else on `cluster`."""

    model: nn.Module
    world: World
    random: DefaultRandom
    plan: Plan | None
    cluster: Cluster | None
    options: Options
    backend: str
    sources: Sources = field(default_factory=Sources)
    plain: bool = False
    """Parameters stay as they are, whole on every rank, as `options` must request."""
    verify: bool = False
    """Compare every program with eager before it runs."""
    family: ModelFamily = field(init=False)

    def __post_init__(self) -> None:
        self.family = ModelFamily([ref(self.model)])

    def facts(self) -> dict[str, str]:
        """What ranks compare before the parameters are distributed."""
        given = self.options.given
        return {
            "autopar": __version__,
            "torch": str(torch.__version__),
            "model": type(self.model).__name__,
            "parameters": digest_params(self.model),
            "plan": self.plan.digest if self.plan else "none",
            "cluster": self.cluster.name if self.cluster else "none",
            "verify": str(self.verify),
            "weights": self.sources.digest,
            **{each.path: str(value_of(given, each)) for each in option_fields()},
            "policy": str(self.options.policy),
            "backend": self.backend,
        }

    def copied(self, model: nn.Module) -> Builder:
        """The same for a copy of the model."""
        copy = replace(self, model=model)
        self.family.models.append(ref(model))
        copy.family = self.family
        return copy

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        groups: AllGroups | None,
        differentiable: frozenset[str],
    ) -> Executable:
        groups = self.family.groups or groups
        agreement = make_agreement(self.world)
        if self.world.size > 1 and not self.plain:
            self._adopt(agreement)
        call = self._call(args, kwargs, signature, differentiable)
        progress = StepProgress(quiet=self.world.rank != 0)

        def stage(name: str) -> AbstractContextManager[None]:
            progress.phase(name)
            return agreement.telling(_TOPICS[name])

        def find(traced: Traced) -> Plan:
            with agreement.telling(_TOPICS["trace"]):
                if self.family.is_first:
                    check_outputs(traced, call.options)
                mark = fingerprint(traced.graph)
                stored = self._stored(traced, mark)
                values = digest_values(flatten((args, kwargs))[0])
            facts = {"graph of the model": mark, BATCH: values}
            agreement.agree(_TOPICS["trace"], facts | signature.facts() | modes(self.model))
            if self.world.size > 1:
                share_constants(traced.gm, self.world.device)
                externals = external_tensors(self.model, traced.graph, traced.externals)
                share_externals(externals.values(), self.world.device)
            progress.phase("plan")
            return stored or self._plan(agreement, call, traced, groups, progress)

        try:
            compiled = compile_call(call, find, stage)
            agreement.agree(_TOPICS["rewrite"], {"plan": compiled.plan.digest})
            random = self._random(agreement, compiled.programs)
            with agreement.telling("the parameters as stored"):
                executable = self._bind(compiled, signature, groups, random)
            agreement.agree("the parameters as stored", {})
            plan = compiled.plan
            self.family.is_first, self.family.groups = False, executable.groups
            self.family.plans[plan.structure.fingerprint] = plan
            if self.verify:
                progress.phase("verify")
                check_call(compiled, call, self.world.rank, agreement.share)
        except BaseException:
            progress.close()
            raise
        name, mesh = plan.structure.model, plan.structure.mesh_text
        progress.close(f"{name} on mesh {mesh}: {summary(plan)}; plan {plan.digest[:12]}")
        return executable

    def _adopt(self, agreement: Agreement) -> None:
        """Adds parameters that are new to the model."""
        new = params.added_params(self.model, self.world, self.family.places)
        with agreement.telling(_NEW):
            names = [name for name, _ in self.model.named_parameters()]
            unknown = [n for n in names if n in new or n not in self.family.places]
            if unknown and isinstance(self.family.groups, StageGroups):
                raise AutoparError(
                    f"parameter {unknown[0]} is new to the model, or took the place of "
                    "another, and a model in stages takes no new ones after its first call: change "
                    "the model before that, compile the changed one, or compile it with "
                    "pipeline.stages=1"
                )
        agreement.agree(_NEW, {"new parameters": ", ".join(new) or "none"})
        params.adopt(self.model, self.world, new)

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        differentiable: frozenset[str],
    ) -> ModelCall:
        plan = self.plan
        planned = (
            planned_gradients(plan.structure) if plan and self.family.is_first else only_losses
        )

        def selects(position: int, name: str) -> bool | None:
            return name in differentiable or planned(position, name)

        input_shardings = {} if self._is_staged else _input_shardings(signature)
        return ModelCall(self.model, args, kwargs, self.options, selects, input_shardings)

    @property
    def _is_staged(self) -> bool:
        """Whether programs are, or may be, pipelines, whose stages take inputs whole."""
        first = self.family.structure or (self.plan and self.plan.structure)
        return first.is_pipeline if first else self.options.is_staged

    def _stored(self, traced: Traced, mark: str) -> Plan | None:
        """The existing plan for this call, if any: one from before, or the user's, which must be
        for the first call."""
        plan = self.plan
        if plan is not None and self.family.is_first:
            check_fit(plan.structure, traced.graph, mark)
        given = {} if plan is None else {plan.structure.fingerprint: plan}
        return (given | self.family.plans).get(mark)

    def _plan(
        self,
        agreement: Agreement,
        call: ModelCall,
        traced: Traced,
        groups: AllGroups | None,
        progress: StepProgress,
    ) -> Plan:
        cluster = self.cluster or parse_cluster(self.world.cluster)
        requested = self.options
        if call.input_shardings:
            # Stages take inputs whole.
            requested = replace(requested, stages_if_needed=False)
        if not self.world.has_host_backend:
            requested = replace(requested, residency_if_needed=False)
        least = requested
        if groups is not None:
            if self.family.structure is not None:
                first = self.family.structure
                requested = replace(
                    requested.in_stages_of(first), cuts=starts_in(traced.graph, first)
                )
            least = requested.for_stored(self._meshes(groups), self._as_stored(traced, groups))

        def planned(options: Options) -> bytes:
            if not self.family.is_first:
                options = replace(options, params_on_host=self.family.params_on_host)
            if not (self.family.is_first and torch.is_grad_enabled()):
                options = dividing(options, traced.graph)
            graph_request = make_call_request(replace(call, options=options), traced, cluster)
            return answer(graph_request, progress).to_bytes()

        def work() -> bytes:
            try:
                return planned(requested if groups is None else requested.joined(least))
            except (ConstraintError, InfeasibleError) as error:
                others = least if groups is not None else _stored_so(requested, error)
                if others is None or not requested.imposed:
                    raise
                warnings.warn(NotImposedWarning(str(error)), stacklevel=2)
                return planned(others)

        return Plan.from_bytes(agreement.share("plan", work))

    def _meshes(self, groups: AllGroups) -> str:
        """The mesh of other calls, as an option."""
        if isinstance(groups, StageGroups):
            assert self.family.structure is not None
            return self.family.structure.mesh_text
        return groups.mesh.text

    def _as_stored(self, traced: Traced, groups: AllGroups) -> dict[str, Sharding]:
        """How parameters are stored already; new ones as others of identical modules."""
        nodes = traced.graph.with_role(Role.PARAM)
        if self.plain:
            assert not isinstance(groups, StageGroups)
            whole = Sharding.replicated(len(groups.mesh))
            return {node.target: whole for node in nodes}
        by_class: dict[str, Sharding] = {}
        known: dict[str, Sharding] = {}
        for node in filter(lambda node: not node.external, nodes):
            path, _, leaf = node.target.rpartition(".")
            held = getattr(self.model.get_submodule(path), leaf)
            name = params.stored_name(node.target, held)
            if name in self.family.storage:
                known[node.target] = by_class[node.key] = self.family.storage[name]
        alike = {node.target: by_class[node.key] for node in nodes if node.key in by_class}
        return alike | known

    def _bind(
        self,
        compiled: Compiled,
        signature: Signature,
        groups: AllGroups | None,
        random: DefaultRandom | None,
    ) -> Executable:
        """The program for this rank; at the first call, parameters are stored as it says."""
        traced, plan, world = compiled.traced, compiled.plan, self.world
        groups = groups or make_all_groups(plan.structure, world)
        places: Mapping[str, ParamPlace] = {}
        if not self.plain:
            places = stored_places(plan.structure, groups)
            self._store(plan.structure, places)
            if isinstance(groups, StageGroups):
                check_holders(compiled, groups)
                places = self.family.places
        meter = Meter(world.device)
        return Executable(
            step=bound_step(compiled, groups, world, self.backend, meter),
            plan=plan,
            backend=self.backend,
            meter=meter,
            groups=groups,
            places=places,
            # The stages of a pipeline all take whole inputs: no rank passes a shard.
            sharded_inputs=sharded_inputs(traced.graph, plan.structure.stages[0].mesh),
            results=results(traced.graph, ((leaf.item, leaf.value) for leaf in traced.outputs)),
            in_spec=traced.in_spec,
            rows=row_results(with_input_shardings(traced.graph, _input_shardings(signature))),
            sequences=sequence_results(traced.graph),
            out_spec=traced.out_spec,
            names=tuple(leaf.name for leaf in traced.outputs),
            random=random,
            reads=traced.reads,
            leavings=traced.leavings,
            externals=traced.externals,
        )

    def _store(self, structure: Structure, places: Mapping[str, ParamPlace]) -> None:
        """Stores the parameters of the model and its copies as the first program has them."""
        family = self.family
        models = [live for model in family.models if (live := model()) is not None]
        choices = {
            name: param.choice
            for name, param in structure.params.items()
            if param.residency != "external"
        }
        if family.is_first:
            family.params_on_host = tuple(n for n, choice in choices.items() if choice.num_on_host)
            family.structure = structure
        else:
            models = [self.model]
        stored = {n: choice.storage for n, choice in choices.items()}
        check_stored(family.storage, stored)
        family.storage = stored | family.storage
        family.places = {**places, **family.places}
        for model in models:
            if self.world.size == 1:
                params.bring_to_host(model, self.family.params_on_host)
            else:
                params.shard_parameters(model, places, self.sources, self.family.params_on_host)

    def _random(self, agreement: Agreement, programs: Iterable[Program]) -> DefaultRandom | None:
        if not any(draws(program.forward) for program in programs):
            return None
        if self.world.size == 1:
            return DefaultRandom(self.world.device)
        if isinstance(self.random, SharedRandom) and not self.random.is_set:
            self.random.set(agreement.share("random state", self.random.default))
        return self.random


def _stored_so(options: Options, error: AutoparError) -> Options | None:
    """The options for a first batch that the strategy cannot divide. Parameters are stored as by
    the strategy, for all batches, and the rest of this program is open. None if the `error` is
    another one, or the strategy leaves storage open."""
    lines = STORAGE.get(options.strategy)
    if lines is None or not isinstance(error, UndividedBatchError):
        return None
    return replace(
        options, strategy="", constraints=(*options.constraints, *map(Constraint.parse, lines))
    )


def _input_shardings(signature: Signature) -> dict[str, InputSharding]:
    """The shardings of inputs that ranks pass in shards, by position."""
    return {str(i): each for i, each in enumerate(signature.input_shardings) if each is not None}
