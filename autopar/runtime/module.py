"""The compiled module: the model as the user knows it, with a program in place of its forward."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.accelerated import Terms, accept, own_rows
from autopar.runtime.binding import Result
from autopar.runtime.doors import TreeSpec, flatten, unflatten
from autopar.runtime.facade import Facade
from autopar.runtime.function import Step
from autopar.runtime.inputs import Inputs, Piece, take_inputs
from autopar.runtime.random import DefaultRandom
from autopar.runtime.unsharded import Whole, generate, whole_parameters
from autopar.runtime.widening import Ready, impossible, remember
from autopar.runtime.world import Groups, World


class Signature(NamedTuple):
    """What a program was made for: a call that differs in any of it needs another one."""

    inputs: tuple[str, ...]
    handed: tuple[str, ...]
    spec: TreeSpec
    modules: tuple[int, ...]
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: tuple[str, ...]

    def facts(self) -> dict[str, str]:
        """What ranks compare."""
        return {
            "inputs": ", ".join(self.inputs),
            "structure of the inputs": str(self.spec),
            "training modes": _runs(self.training),
            "trainable parameters": _runs(self.trainable),
            "autocast": ", ".join(self.autocast) or "off",
        }


@dataclass(frozen=True, slots=True)
class Executable:
    """A program bound to this rank.

    `storage` has DTensor's placements of each parameter on `groups.params`, but for those that are
    plain tensors, whole on every rank; `pieces` the inputs that the program takes in the pieces
    that ranks are handed, by name ("input:0"); `rows` the results that have a row per row of the
    batch that ranks hold pieces of; `random` is what it draws random numbers from, if it draws any.
    `in_spec` is that of (args, kwargs), and `names` what users call the outputs, by position.
    `origin` is the same for all programs of a call, each with gradients of more outputs.
    """

    step: Step
    plan: Plan
    groups: Groups | None
    storage: Mapping[str, tuple[Placement, ...]]
    pieces: frozenset[str]
    results: tuple[Result, ...]
    rows: frozenset[str]
    in_spec: TreeSpec
    out_spec: TreeSpec
    names: tuple[str, ...]
    random: DefaultRandom | None
    origin: object = field(default_factory=object)


class Build(Protocol):
    """Makes a program for a call; an input of which ranks hold pieces is a meta tensor of the
    whole's shape. The groups are those of the programs made before, whose mesh it must share; None
    for the first, at which the model's parameters are to be sharded. `differentiable` are the
    names of outputs that backwards have gone through."""

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: Signature,
        groups: Groups | None,
        differentiable: frozenset[str],
    ) -> Executable: ...

    def copied(self, model: nn.Module) -> Build:
        """The same for a copy of the model, whose parameters are stored alike."""
        ...


@dataclass
class Runner:
    """Calls the program made for a call's signature; has it made where there is none yet."""

    model: nn.Module
    world: World
    build: Build
    inputs: Inputs | None = None
    terms: Terms | None = None
    made: dict[str, list[tuple[Signature, Executable]]] = field(default_factory=dict)
    groups: Groups | None = None
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    differentiable: frozenset[str] = frozenset()
    """The names of outputs that backwards have gone through."""
    with_values: bool = False
    """Programs are made from the values of a batch, gathered where ranks hold pieces of it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.terms is None:
            return self._run(args, kwargs)
        kwargs = self.terms.take(kwargs)
        with self.terms.autocast():
            return self.terms.give(self._run(args, kwargs), kwargs)

    @property
    def handed_out(self) -> Inputs:
        """What ranks are handed of the inputs: unless said, all, and rows from accelerate."""
        return self.inputs or ("local" if self.terms else "global")

    def accept_accelerate(self) -> None:
        """From now on the model is one that accelerate has prepared (`accelerated`)."""
        self.terms = self.terms or accept(self.model, self.world)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, executable = self.prepare(args, kwargs)
        step, params, others, random = ready = self._ready(executable, leaves)
        past = None
        if step.cut and step.is_differentiated:
            wider = partial(self._wider, executable, leaves)
            past = remember(ready, leaves, executable.names, wider)
        with random.drawn_from() if random is not None else nullcontext():
            results = step(params, others, past)
        with torch.no_grad():
            for name in [name for name in results if name.startswith("mutation:")]:
                self._tensor(name.partition(":")[2]).copy_(results.pop(name))
        if self.terms is not None:
            results |= {name: own_rows(results[name], self.world) for name in executable.rows}
        leaves = [r.value if r.name is None else results[r.name] for r in executable.results]
        return unflatten(leaves, executable.out_spec)

    def _ready(self, executable: Executable, leaves: list[Any]) -> Ready:
        step = executable.step
        params = {name: self._param(executable, name) for name in step.params}
        others = {
            name: self._other(executable, name, leaves)
            for name in step.forward_inputs
            if not name.startswith("param:")
        }
        random = self.terms.random(executable.random) if self.terms else executable.random
        return Ready(step, params, others, random)

    def _wider(self, executable: Executable, leaves: list[Any], outputs: frozenset[str]) -> Ready:
        """A call that `executable` was run for, with a program that has gradients of `outputs`."""
        found = self._executable(leaves, executable.in_spec)
        if found.origin is not executable.origin:
            raise impossible(outputs, "the model was changed since, as by train() or eval()")
        if any(found.names[position] in outputs for position in found.step.cut_positions):
            self.differentiable |= outputs
            for same in self.made.values():
                for index, (signature, known) in enumerate(same):
                    if known is found:
                        made = self._make(leaves, signature)
                        found = replace(made, origin=executable.origin)
                        same[index] = signature, found
        return self._ready(found, leaves)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the programs made so far."""
        return tuple(executable.plan for same in self.made.values() for _, executable in same)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Executable]:
        """The leaves of a call, and the program for it, made if there is none yet."""
        # The order of keywords means nothing, and must not make another program.
        kwargs = dict(sorted(kwargs.items()))
        leaves = take_inputs(self.model, self.handed_out, self.world, args, kwargs)
        return leaves, self._executable(leaves, flatten((args, kwargs))[1])

    def copied(self, model: nn.Module) -> Runner:
        """The same for a copy of the model, with no programs yet."""
        return Runner(
            model, self.world, self.build.copied(model), self.inputs, with_values=self.with_values
        )

    def _executable(self, leaves: list[Any], spec: TreeSpec) -> Executable:
        signature = self._signature(leaves, spec)
        same = self.made.setdefault(", ".join(signature.inputs), [])
        for known, executable in same:
            if known == signature:
                return executable
        executable = self._make(leaves, signature)
        same.append((signature, executable))
        return executable

    def _make(self, leaves: list[Any], signature: Signature) -> Executable:
        stand_ins = [self._stand_in(leaf) if isinstance(leaf, Piece) else leaf for leaf in leaves]
        args, kwargs = unflatten(stand_ins, signature.spec)
        executable = self.build(args, kwargs, signature, self.groups, self.differentiable)
        self.groups = executable.groups
        self.places = {
            name: (self.model.get_submodule(path), leaf)
            for name, path, leaf in map(_split, _state_names(self.model))
        }
        return executable

    def _stand_in(self, piece: Piece) -> Tensor:
        return piece.whole() if self.with_values else piece.stand_in()

    def _signature(self, leaves: list[Any], spec: TreeSpec) -> Signature:
        return Signature(
            inputs=tuple(map(describe, leaves)),
            handed=tuple(leaf.handed if isinstance(leaf, Piece) else "" for leaf in leaves),
            spec=spec,
            modules=tuple(map(id, self.model.modules())),
            training=tuple(module.training for module in self.model.modules()),
            trainable=tuple(param.requires_grad for param in self.model.parameters()),
            autocast=tuple(
                f"{device} {torch.get_autocast_dtype(device)}"
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            ),
        )

    def _tensor(self, name: str) -> Tensor:
        module, leaf = self.places[name]
        found = getattr(module, leaf)
        if not isinstance(found, Tensor):
            raise AutoparError(f"{name} was a tensor of the model when it was planned, and is none")
        return found

    def _param(self, executable: Executable, name: str) -> Tensor:
        """The parameter, as the program stores it."""
        param = self._tensor(name)
        if executable.groups is None or name not in executable.storage:
            return param
        if not isinstance(param, DTensor):
            raise AutoparError(f"parameter {name} was replaced after autopar.compile")
        wanted = executable.storage[name]
        if param.placements != wanted:
            raise AutoparError(
                f"parameter {name} is {param.placements} where its program needs {wanted}: it was "
                "redistributed after autopar.compile"
            )
        return param

    def _other(self, executable: Executable, name: str, leaves: list[Any]) -> Tensor:
        kind, _, rest = name.partition(":")
        if kind != "input":
            return self._tensor(rest)
        piece: Piece = leaves[int(rest)]
        return piece.local if name in executable.pieces else piece.whole()


class CompiledModule(Facade):
    """A model that trains on all ranks. It has the attributes, names, parameters and buffers of the
    model it was made from, and shares them with it: a change to one is a change to both.

    The first call plans, and so does each call of another signature (shapes, dtypes, constants,
    training mode); programs are kept. Results come as the model's own containers. A loss is a plain
    scalar, equal on every rank; other results behave as on one device, though ranks may hold pieces
    of them (`sharded`). Hooks of the model are part of the program.
    """

    __slots__ = ("_model", "_runner")
    # In slots, since __dict__ is the model's: that is what keeps names, modes and attributes one.
    _model: nn.Module
    _runner: Runner

    def __init__(self, model: nn.Module, runner: Runner) -> None:
        object.__setattr__(self, "__dict__", vars(model))
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_runner", runner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner(args, kwargs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each program made so far, one per signature of calls; empty before the first
        call."""
        return self._runner.plans

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Make the program for a call like this one, and store the parameters as it says, without
        running it: before a checkpoint is loaded, say. All ranks are to call it."""
        self._runner.prepare(args, kwargs)

    @contextmanager
    def unsharded(
        self, rank: int | None = None, *, writeback: bool = True
    ) -> Generator[nn.Module | None, None, None]:
        """Inside, parameters are plain and whole, and this model is the plain one, on all ranks or
        on one; given is the plain model, or None on ranks that do not have it. All ranks are to
        enter and to leave. What `rank` (of all, rank 0) changes in place is kept, or undone without
        `writeback`; gradients are refused (`runtime.unsharded`)."""
        runner = self._runner
        if isinstance(runner, Whole):
            raise AutoparError("unsharded() is inside of unsharded(): once is enough")
        with whole_parameters(self._model, runner.world, rank, writeback) as here:
            object.__setattr__(self, "_runner", Whole(self._model, runner, here))
            try:
                yield self._model if here else None
            finally:
                object.__setattr__(self, "_runner", runner)

    @property
    def generate(self) -> Callable[..., Any]:
        """That of a model of `transformers`, to be called by all ranks, each of which holds whole
        parameters meanwhile. AttributeError for others."""
        own: Any = getattr(self._model, "generate", None)
        if own is None:
            raise AttributeError(f"{type(self._model).__name__} has no generate")
        runner = self._runner
        if isinstance(runner, Whole):
            runner.check()
            return own
        entire = self.unsharded(writeback=False)
        return partial(generate, own, entire, runner.world, runner.handed_out)

    def train(self, mode: bool = True) -> CompiledModule:
        self._model.train(mode)
        return self

    def extra_repr(self) -> str:
        return f"autopar, made from {type(self._model).__name__}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._model, name)

    def __copy__(self) -> CompiledModule:
        raise AutoparError("a compiled model shares its parameters with nothing: copy.deepcopy it")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A compiled model with parameters of its own, stored as these are; the plain model inside
        of `unsharded`."""
        model = copy.deepcopy(self._model, memo)
        if isinstance(self._runner, Whole):
            return model
        return CompiledModule(model, self._runner.copied(model))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The plain model, to be compiled again where it is loaded."""
        if self._runner.world.size > 1 and not isinstance(self._runner, Whole):
            raise AutoparError(
                "the parameters of this model are in shards, which no file of one rank can hold: "
                "pickle it inside `with model.unsharded(rank=0):`, or save its state_dict() with "
                "torch.distributed.checkpoint"
            )
        # By what every Python has: neither autopar nor its classes are needed to load it.
        return operator.getitem, ([self._model], 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModule:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            # What has no values yet will have them on the device of the rank.
            device = self._runner.world.device if tensor.is_meta else tensor.device
            probe = torch.empty(0, dtype=tensor.dtype, device=device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise AutoparError(
                    f"{name} cannot go from {probe.dtype} on {probe.device} to {changed.dtype} on "
                    f"{changed.device} once the model is compiled: move or cast the model before "
                    "autopar.compile"
                )
        return self


def describe(leaf: Any) -> str:
    """`float32[8, 16]` of a tensor, the value of a constant, the type of anything else."""
    if isinstance(leaf, Piece):
        return leaf.describe()
    if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(leaf)
    return type(leaf).__qualname__


def _state_names(model: nn.Module) -> list[str]:
    params = (name for name, _ in model.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    return [*params, *buffers]


def _split(name: str) -> tuple[str, str, str]:
    path, _, leaf = name.rpartition(".")
    return name, path, leaf


def _runs(flags: tuple[bool, ...]) -> str:
    """`3 yes, 1 no, 2 yes`."""
    runs: list[tuple[bool, int]] = []
    for flag in flags:
        count = runs.pop()[1] if runs and runs[-1][0] == flag else 0
        runs.append((flag, count + 1))
    return ", ".join(f"{count} {'yes' if flag else 'no'}" for flag, count in runs)
