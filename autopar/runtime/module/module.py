"""The compiled module: the model as the user knows it, with a program in place of its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.plans.plan import Plan
from autopar.runtime.module.facade import Facade
from autopar.runtime.module.runner import Runner
from autopar.runtime.module.unsharded import Whole, generate_tokens, whole_parameters
from autopar.runtime.process.alone import know_copy


class CompiledModule(Facade):
    """A model that trains on all ranks. It has the attributes, names, parameters and buffers of the
    model it was made from, and shares them with it: a change to one is a change to both.

    The first call plans, and so does each call of another signature (shapes, dtypes, constants,
    training mode); programs are kept. Results come as the model's own containers. A loss is a plain
    scalar, equal on every rank; other results behave as on one device, though ranks may hold shards
    of them (`sharded`). Hooks of the model are part of the program.
    """

    __slots__ = ("_model", "_runner")
    # In slots, since __dict__ is the model's: so both share names, modes and attributes.
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
        return tuple(each.plan for each in self._runner.programs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Make the program for a call like this one, and shard the parameters for it, without
        running it: before a checkpoint is loaded, say. All ranks must call it."""
        self._runner.prepare(args, kwargs)

    @contextmanager
    def unsharded(
        self, rank: int | None = None, *, writeback: bool = True
    ) -> Generator[nn.Module | None, None, None]:
        """Inside, parameters are plain and whole, and this model is the plain one, on all ranks or
        on one. Yields the plain model, or None on ranks that do not have it. All ranks must enter
        and leave. In-place changes by `rank` (of all, rank 0) stay, or are undone without
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
        return partial(generate_tokens, own, entire, runner.world, runner.results_in_order)

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
        copied = CompiledModule(model, self._runner.copied(model))
        know_copy(copied, model)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The plain model with whole parameters, as it would be by itself: neither autopar nor its
        classes are needed to load it."""
        return self._model.__reduce_ex__(protocol)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModule:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            # Tensors without values yet will get them on the device of the rank.
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


def runner_of(model: CompiledModule) -> Runner:
    """What runs the programs of `model`."""
    return model._runner
