"""`torch.compile(model, backend="autopar")`.

dynamo captures the model in its own way, as a graph whose inputs include the parameters. They
belong to the user's model, and dynamo guards on their type. They therefore stay plain tensors,
whole on every rank, as under DistributedDataParallel. The computation is planned, and each rank
does a part of it. Gradients are whole on every rank in the end, and every rank's optimizer does the
same. To store parameters in shards, use `autopar.compile`.

All ranks must pass the same global batch. Parameters and buffers start as rank 0 has them. Every
output is whole and has a gradient. The model must be one graph: `fullgraph=True` shows where it is
not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.cost_model.optimizer_kinds import optimizer_name
from autopar.driver.arguments import read_cluster, with_old_names
from autopar.driver.planning import describe_cluster
from autopar.driver.training.session import Builder
from autopar.errors import AutoparError
from autopar.plans.compatibility import check_cluster
from autopar.plans.requests.constraints import Constraint
from autopar.plans.requests.matching import matches
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import GROUPS, as_group, check_known, options_among
from autopar.plans.requests.read_options import make_options
from autopar.runtime.module.runner import Runner
from autopar.runtime.process.agreement import make_agreement
from autopar.runtime.process.own_group import broadcast, know_bytes
from autopar.runtime.process.world import device_of, join, look
from autopar.runtime.program import backend as backends
from autopar.runtime.program.random import DefaultRandom
from autopar.runtime.program.sharded import whole_of
from autopar.tracer.fx_graphs import labelled

_OPTIONS = {
    "": ("mesh", "optimizer", "backend"),
    "memory": ("limit", "host"),
    "constraints": ("pins", "forbid", "strategy"),
    "search": ("work_limit", "time_limit", "strict"),
}
"""The options of a plan that are taken, by group, beside `cluster` and `profile`."""
_SAYS_NOTHING = {"residency": "cuda"}
"""Options that say what is so in any case."""
_ITSELF = 'torch.compile(backend="autopar")'
_INSTEAD = (
    "parameters stay whole on every rank there, as torch.compile has them; autopar.compile(model, "
    "...) stores them in shards"
)
_UNSPLIT = (
    "gradients come from the script for every output there, which has to see the whole batch; "
    "autopar.compile(model, microbatches=...) has them"
)
_STATE = re.compile(r"\['([^']+)'\]")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """What dynamo runs in place of `gm`: planned at the first call, by all ranks together.

    `options` (`torch.compile(..., options={"mesh": "2x2"})`) are keywords of `autopar.compile`.
    AutoparError, at once, on any other option, or on one that stores parameters in shards.
    """
    if mode is not None:
        raise AutoparError(f'{_ITSELF} has no modes: leave out mode="{mode}"')
    given = with_old_names(_ITSELF, options or {})
    if "microbatches" in given:
        raise AutoparError(f"{_ITSELF} has no microbatches: {_UNSPLIT}")
    _check_taken(given)
    flat = _Flat(gm, example_inputs)
    name = optimizer_name(given.get("optimizer", "adamw"), flat)
    requested = make_options(
        **options_among(given) | {"optimizer": name}, microbatches=1, pipeline={"stages": 1}
    )
    requested = replace(requested, residency_if_needed=False)
    _check_whole(requested, flat)
    (outputs,) = next(node for node in gm.graph.nodes if node.op == "output").args
    return _Compiled(flat, given, requested, [_is_scalar(_value(node)) for node in outputs])


def _check_taken(given: Mapping[str, Any]) -> None:
    """ArgumentError on an option that is not taken."""
    top = (*_OPTIONS[""], *filter(None, _OPTIONS), "cluster", "profile")
    check_known(_ITSELF, given, top)
    for name in (name for name in GROUPS if name in given):
        group, usual = as_group(name, given[name]), GROUPS[name]()
        changed = [
            n
            for n in group.__struct_fields__
            if getattr(group, n) not in (getattr(usual, n), _SAYS_NOTHING.get(n, getattr(usual, n)))
        ]
        check_known(f"{name} of {_ITSELF}", changed, _OPTIONS[name])


def _check_whole(options: Options, flat: nn.Module) -> None:
    """AutoparError if an option stores a parameter in shards."""
    if options.strategy not in ("", "ddp"):
        raise AutoparError(f"{_ITSELF} cannot do strategy {options.strategy}: {_INSTEAD}")
    for constraint in options.constraints:
        named = any(matches(constraint.pattern, name) for name, _ in flat.named_parameters())
        if constraint.kind in ("", "param") and named and constraint.placement.shards:
            raise AutoparError(f"{_ITSELF} cannot do {constraint.origin}: {_INSTEAD}")


class _Flat(nn.Module):
    """`gm` as a module, with the parameters and buffers among its inputs under their names."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        # In a list, since it is no part of the model.
        self.graph = [gm]
        self.states: list[tuple[dict[str, Any], str] | None] = []
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        for node, value in zip(placeholders, example_inputs, strict=True):
            is_param = isinstance(value, nn.Parameter)
            # How dynamo marks what is a module's state and not an argument of the call.
            marked = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
            if not is_param and not (marked and isinstance(value, Tensor)):
                self.states.append(None)
                continue
            *path, leaf = _name(node).split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            table: dict[str, Any] = module._parameters if is_param else module._buffers
            table[leaf] = value
            self.states.append((table, leaf))

    def take(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of a call among `values`; the others become the module's state."""
        arguments: list[Any] = []
        for state, value in zip(self.states, values, strict=True):
            if state is None:
                arguments.append(value)
            else:
                table, leaf = state
                table[leaf] = value
        return arguments

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        given = iter(arguments)
        values = [next(given) if s is None else s[0][s[1]] for s in self.states]
        outputs = labelled(self.graph[0], values)
        # A scalar would be taken for a loss, and leave the other outputs without gradients.
        return tuple(x.reshape(1) if _is_scalar(x) else x for x in outputs)


class _Compiled:
    """Runs a graph of dynamo's, for which it builds the program at the first call."""

    def __init__(
        self, flat: _Flat, given: dict[str, Any], options: Options, scalars: list[bool]
    ) -> None:
        self.flat = flat
        self.given = given
        self.options = options
        self.scalars = scalars
        self.runner: Runner | None = None

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        arguments = self.flat.take(values)
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.requires_grad:
                raise AutoparError(
                    "torch.compile broke the model into several graphs, and autopar cannot send "
                    "gradients from one to the other: fullgraph=True shows where it breaks"
                )
        if self.runner is None:
            self.runner = self._runner()
        outputs = self.runner(tuple(arguments), {})
        return tuple(_plain(x, scalar) for x, scalar in zip(outputs, self.scalars, strict=True))

    def _runner(self) -> Runner:
        options, flat = self.options, self.flat
        if any(True for _ in flat.parameters()):
            whole = Constraint.parse("param:* = R", "parameters whole, as torch.compile has them")
            options = replace(options, constraints=(whole, *options.constraints))
        cluster = read_cluster(self.given.get("cluster"), flat)
        kind = cluster.device.kind if cluster else None
        world = look(device_of(flat), kind)
        profile = self.given.get("profile")
        if cluster is not None:
            cluster = describe_cluster(cluster, profile)
            check_cluster(cluster, world.size)
        world = join(device_of(flat), kind)
        chosen = backends.choose(self.given.get("backend"), world.device)
        agreement = make_agreement(world)
        with world.working("compilation"), torch.no_grad():
            with agreement.telling("the model and the plan"):
                if cluster is None:
                    cluster = describe_cluster(world.cluster, profile)
                world.check_nodes(cluster)
                random = DefaultRandom(world.device)
                builder = Builder(flat, world, random, None, cluster, options, chosen, plain=True)
            agreement.agree("the model and the plan", builder.facts())
            if world.size > 1:
                know_bytes()
                for tensor in (*flat.parameters(), *flat.buffers()):
                    broadcast(tensor.data)
        return Runner(flat, world, builder)


def _name(node: fx.Node) -> str:
    """`layers.0.weight` of a placeholder that stands for `L['self']._modules['layers']...`."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    path = getattr(source, "name", "")
    names = _STATE.findall(path if isinstance(path, str) else path())[1:]
    return ".".join(names) or node.name


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _plain(value: Any, is_scalar: bool) -> Any:
    if isinstance(value, Tensor):
        value = whole_of(value)
    return value.reshape(()) if is_scalar else value
