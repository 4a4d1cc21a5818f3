"""Programs for calls of a model, and the tensors of the model that they take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from autopar.errors import AutoparError, GuardError
from autopar.ir.graph import Graph, Role
from autopar.ir.sharding import InputSharding
from autopar.plans.plan import Plan
from autopar.runtime.process.alone import compare_beside
from autopar.runtime.process.inputs import InputShard
from autopar.runtime.process.stage_groups import StageGroups
from autopar.runtime.process.world import Groups, ParamPlace
from autopar.runtime.program.binding import Result, RowResult
from autopar.runtime.program.externals import at_place, external_number, whole_external
from autopar.runtime.program.frozen import PLAIN, Freezer
from autopar.runtime.program.function import Step
from autopar.runtime.program.guards import Guard, Read
from autopar.runtime.program.leavings import LeftBehind
from autopar.runtime.program.meter import Meter
from autopar.runtime.program.random import DefaultRandom
from autopar.runtime.torch_private import TreeSpec, is_forward_mode, is_transforming

# Tensors that hooks make of parameters before each forward, as those of `torch.nn.utils.prune` and
# of the `weight_norm` that is no parametrization do.
#
# Hooks are part of a program, and tensors that they set on a module are removed once the model is
# traced. A script may read them all the same: `prune` takes the least values of `module.weight`. So
# they are recreated after each call.


class RecreatedTensor(NamedTuple):
    """A tensor of a module, and the function of a hook that computes its value."""

    module: nn.Module
    name: str
    value: Callable[[nn.Module], Tensor]


def recreated_by_hooks(model: nn.Module) -> Iterator[RecreatedTensor]:
    """The tensors that pruning and weight-norm hooks of a model set."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                yield RecreatedTensor(module, hook._tensor_name, hook.apply_mask)
            elif isinstance(hook, WeightNorm):
                yield RecreatedTensor(module, hook.name, hook.compute_weight)


def remake(tensors: Iterable[RecreatedTensor]) -> None:
    """Recompute the tensors. They stay the same objects of the same version, at which guards
    look."""
    for module, name, value in tensors:
        with torch.enable_grad():
            new = value(module)
        held = getattr(module, name, None)
        if isinstance(held, Tensor) and type(held) is type(new) and held.shape == new.shape:
            with torch.no_grad():
                held.data.copy_(new.detach())
        else:
            setattr(module, name, new)


# The leaves of a call's arguments: a program is made for these.

CONSTANTS = frozenset({*PLAIN, float})
"""Types of arguments that are constants of a program, known by their `repr`."""


def describe_argument(leaf: Any) -> str:
    """`float32[8, 16]` of a tensor, the value of a constant, the type of anything else."""
    if isinstance(leaf, InputShard):
        return leaf.describe()
    return repr(leaf) if type(leaf) in CONSTANTS else type(leaf).__qualname__


def objects_among(leaves: list[Any]) -> Iterator[Hashable]:
    """The arguments that are neither tensors nor constants, frozen. GuardError if one holds a
    tensor."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, InputShard) and type(leaf) not in CONSTANTS:
            where = f"argument {position} (a {type(leaf).__qualname__})"
            yield _Argument(where).freeze(leaf, where)


def check_transforms(leaves: Iterable[Any]) -> None:
    """AutoparError inside of a transform of `torch.func`, and if an argument has a forward-mode
    derivative: a program is one autograd node, with a backward."""
    if not is_transforming() and (
        not is_forward_mode()
        or all(unpack_dual(x).tangent is None for x in leaves if isinstance(x, Tensor))
    ):
        return
    raise AutoparError(
        "a compiled model gives gradients by backward() and torch.autograd.grad alone: for "
        "torch.func (grad, vmap, jacrev, jvp) and forward-mode derivatives take the plain one, "
        "with model.unsharded() as plain: ..., or do it inside of forward"
    )


class _Argument(Freezer):
    """Freezes an argument. Its tensors would be other ones at each call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def tensor(self, held: Tensor) -> Hashable:
        if self.is_inside_object:
            raise GuardError(
                f"{self._where} holds a tensor where autopar cannot look: pass tensors as "
                "arguments of their own or in tuples, lists and dicts, or register the class with "
                "torch.export.register_dataclass"
            )
        return super().tensor(held)


class Signature(NamedTuple):
    """The arguments that a program was made for: a call with another signature needs another
    program. `objects` are the arguments that are neither tensors nor constants, frozen."""

    inputs: tuple[str, ...]
    input_shardings: tuple[InputSharding | None, ...]
    objects: tuple[Hashable, ...]
    spec: TreeSpec
    autocast: tuple[str, ...]

    def facts(self) -> dict[str, str]:
        """What ranks compare."""
        return {
            "inputs": ", ".join(self.inputs),
            "structure of the inputs": str(self.spec),
            "autocast": ", ".join(self.autocast) or "off",
        }


@dataclass(frozen=True, slots=True)
class Executable:
    """A program bound to this rank.

    `places` says where each parameter lies, without those that are plain tensors, whole on every
    rank. `sharded_inputs` ("input:0") are the inputs taken as local shards. `rows` are the results
    with rows of a sharded batch; `sequences` those whose dim 1 is that of inputs, with their
    positions. `random` is the generator to draw from, if it draws. `in_spec` is the structure of
    (args, kwargs), and `names` are the user's names of the outputs, by position. `origin` is shared
    by all programs of a call, each of which has gradients of more outputs. `reads` are the values
    that the program depends on apart from its arguments, and `leavings` those that forward leaves
    on the model. `externals` are the script's tensors that are inputs, by their numbers.
    """

    step: Step
    plan: Plan
    backend: str
    meter: Meter
    groups: Groups | StageGroups | None
    places: Mapping[str, ParamPlace]
    sharded_inputs: frozenset[str]
    results: tuple[Result, ...]
    rows: Mapping[str, RowResult]
    sequences: Mapping[str, tuple[int, ...]]
    in_spec: TreeSpec
    out_spec: TreeSpec
    names: tuple[str, ...]
    random: DefaultRandom | None
    reads: tuple[Read, ...]
    leavings: tuple[LeftBehind, ...] = ()
    externals: tuple[Tensor, ...] = ()
    origin: object = field(default_factory=object)


@dataclass(slots=True)
class ProgramEntry:
    """A program, the `number`-th that all ranks made together. It runs calls of this signature
    while `guard` holds. `slots` has the place of each external tensor among those that the guard
    sees."""

    number: int
    signature: Signature
    guard: Guard
    executable: Executable
    slots: tuple[int, ...]
    params: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The parameters it takes, by name, while the guard holds."""
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The same of buffers, by their names among the inputs of its forward graph."""
    recreated: tuple[RecreatedTensor, ...] = ()
    """What hooks make of parameters before each forward."""
    trained: tuple[bool, ...] = ()
    """Which of the parameters require gradients."""
    others: tuple[str, ...] = ()
    """Those among `params` that are the script's: each call redistributes them to the program's
    placements."""

    @classmethod
    def of(
        cls, number: int, signature: Signature, model: nn.Module, executable: Executable
    ) -> ProgramEntry:
        """A program that was just made, for the model as it is."""
        names = (*executable.step.params, *_buffers(executable))
        own = (Read(*owner_of(model, n), n) for n in names if external_number(n) is None)
        guard = Guard(model, [*executable.reads, *own])
        seen = [id(x) for x in guard.trained]
        slots = tuple(seen.index(id(x)) for x in executable.externals)
        # This call's tensors may have an autograd history, which would live as long as the program.
        entry = cls(number, signature, guard, replace(executable, externals=()), slots)
        entry.collect(model)
        return entry

    def collect(self, model: nn.Module) -> None:
        """Take parameters, buffers and recreated tensors from the model as it is now."""
        self.params = {name: self.tensor(model, name) for name in self.executable.step.params}
        self.recreated = tuple(recreated_by_hooks(model))
        self.trained = tuple(param.requires_grad for param in self.params.values())
        self.others = tuple(
            name
            for name, x in self.params.items()
            if not isinstance(x, nn.Parameter) or external_number(name) is not None
        )
        self.buffers = {f"buffer:{n}": tensor_of(model, n) for n in _buffers(self.executable)}

    def tensor(self, model: nn.Module, name: str) -> Tensor:
        """A parameter or buffer of the model, or a tensor of the script's."""
        number = external_number(name)
        return tensor_of(model, name) if number is None else self.guard.trained[self.slots[number]]

    def is_stored(self, model: nn.Module) -> bool:
        """Whether parameters are stored as the program has them, and buffers are plain: none was
        added. A script's tensors in the place of parameters are redistributed in each call."""
        executable = self.executable
        if executable.groups is None:
            return True
        params = (
            (tensor_of(model, name), place)
            for name, place in executable.places.items()
            if name in executable.step.params
        )
        return all(
            not isinstance(param, nn.Parameter)
            or (isinstance(param, DTensor) and (param.device_mesh, param.placements) == place)
            for param, place in params
        ) and not any(isinstance(tensor_of(model, n), DTensor) for n in _buffers(executable))

    def ready_params(self, device: torch.device) -> Mapping[str, Tensor]:
        """The program's parameters for a call."""
        if not self.others:
            return self.params
        params = dict(self.params)
        for name in self.others:
            x, place = params[name], self.executable.places.get(name)
            compare_beside(f"{name}, which forward reads", [x])
            params[name] = whole_external(x, device) if place is None else at_place(x, name, *place)
        return params


def _buffers(executable: Executable) -> list[str]:
    """The names of those that a program takes."""
    inputs = (name.partition(":") for name in executable.step.forward_inputs)
    return [name for kind, _, name in inputs if kind == "buffer"]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or a buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer. AutoparError if it is gone."""
    module, leaf = owner_of(model, name)
    tensor = getattr(module, leaf, None)
    if not isinstance(tensor, Tensor):
        raise AutoparError(f"{name} was a tensor of the model when it was planned, and is none")
    return tensor


def external_tensors(
    model: nn.Module, graph: Graph, numbered: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The script's tensors that a step has as parameters, by their names there; `numbered` are
    those that no module has."""
    names = (node.target for node in graph.with_role(Role.PARAM) if node.external)
    numbers = {name: external_number(name) for name in names}
    return {
        name: tensor_of(model, name) if number is None else numbered[number]
        for name, number in numbers.items()
    }
