"""One step of a compiled program as one node of autograd.

Both graphs take their inputs as a list that they clear, so that a tensor is freed at its last use.
Tensors saved for backward are passed by reference, outside of autograd's own saved tensors: those
would stay alive until the whole backward graph has run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor_private import dtensor_like, shard_of
from autopar.runtime.process.alone import compare_beside
from autopar.runtime.process.moves import moves
from autopar.runtime.program.batched import one_by_one
from autopar.runtime.program.sharded import output, whole_of
from autopar.runtime.program.sharded_ops import Place
from autopar.runtime.torch_private import is_batched, keeps_graph

_GRADED = ("loss", "value")
_CHANGED_BY = {"mutation": "buffer", "update": "param"}

RunnableGraph = Callable[[list[Any]], Sequence[Any]]
"""A graph over local tensors; it may clear its list of inputs."""

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward."
)
_TWICE = (
    "a compiled model gives first derivatives only: create_graph=True is not possible through it"
)
_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: a parameter or input was changed between the forward and the backward of a "
    "compiled model ({name})"
)


@dataclass(frozen=True)
class Step:
    """A program as it runs on this rank.

    Names are `codegen.Program`'s: inputs `param:NAME`, `buffer:NAME`, `input:I`; outputs
    `loss:POS`, `value:POS`, `detached:POS`, `mutation:NAME`, `update:NAME`, `saved:K`; backward
    inputs `saved:K`, `tangent:POS`; backward outputs `grad:NAME`. `backward` is None if there is
    nothing to differentiate. `inference` computes the same results if nothing is differentiated; it
    is `forward` unless given. `places` has the placements of detached results, `cut` those of them
    that have a gradient in eager. `reach` has, for some parameters, the positions of the results
    that they get a gradient from. Without a gradient of any of these, the parameter's is None.
    """

    forward: RunnableGraph
    backward: RunnableGraph | None
    forward_inputs: tuple[str, ...]
    forward_outputs: tuple[str, ...]
    backward_inputs: tuple[str, ...] = ()
    backward_outputs: tuple[str, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])
    cut: frozenset[str] = frozenset()
    reach: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    inference: RunnableGraph | None = None
    _saved_params: tuple[int, ...] | None = field(default=None, init=False, compare=False)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters that the forward graph reads or the backward graph has a gradient
        of, in a fixed order."""
        names = [name for name in self.forward_inputs if name.startswith("param:")]
        names += [f"param:{_rest(name)}" for name in self.backward_outputs]
        return tuple(_rest(name) for name in dict.fromkeys(names))

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The forward outputs that are not saved for backward."""
        return tuple(n for n in self.forward_outputs if _kind(n) != "saved")

    @cached_property
    def positions(self) -> tuple[str, ...]:
        """The names of `results` without their kinds."""
        return tuple(map(_rest, self.results))

    @cached_property
    def saves(self) -> tuple[str, ...]:
        """The forward outputs that are saved for backward."""
        return tuple(n for n in self.forward_outputs if _kind(n) == "saved")

    @cached_property
    def graded(self) -> tuple[str, ...]:
        """The results that have a gradient."""
        return tuple(n for n in self.results if _kind(n) in _GRADED or n in self.cut)

    @cached_property
    def grads(self) -> tuple[str, ...]:
        """The parameters whose gradients the backward graph returns, in its order."""
        return tuple(map(_rest, self.backward_outputs))

    @cached_property
    def _param_of(self) -> tuple[str | None, ...]:
        """For each forward input, its parameter, or None."""
        pairs = ((_kind(name), _rest(name)) for name in self.forward_inputs)
        return tuple(rest if kind == "param" else None for kind, rest in pairs)

    @cached_property
    def _is_saved(self) -> tuple[bool, ...]:
        """For each forward output, whether it is saved for backward."""
        return tuple(_kind(name) == "saved" for name in self.forward_outputs)

    def is_reached(self, name: str, given: Collection[str]) -> bool:
        """Whether a parameter has a gradient in a backward through results at these positions."""
        return name not in self.reach or not self.reach[name].isdisjoint(given)

    @property
    def is_differentiated(self) -> bool:
        """Whether a call now would be a node of autograd's."""
        return self.backward is not None and torch.is_grad_enabled()

    def __call__(
        self,
        params: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        past: PastCall | None = None,
        trained: tuple[bool, ...] | None = None,
    ) -> dict[str, Tensor]:
        """The results by name. `params` are parameters by name, plain or DTensors stored as the
        program expects, which receive gradients of their kind; `others` are buffers and inputs
        under their names in `forward_inputs`. `past` is used if a backward goes through results
        that are `cut`. RefrozenError, before anything runs, if `trained` is not the parameters'
        `requires_grad`, which autograd determines anyway."""
        if self.is_differentiated:
            leaves = (params[name] for name in self.params)
            values = _Differentiable.apply(self, others, past, trained, *leaves)
        else:
            inputs = self.inputs(params, others)
            results = _run(self.inference, inputs) if self.inference else self.run(inputs)[0]
            values = self.shown(results)
        return dict(zip(self.results, values, strict=True))

    @cached_property
    def changes(self) -> list[str]:
        """The buffers and parameters that a call changes, as in `forward_inputs`."""
        pairs = [(_CHANGED_BY.get(_kind(name)), _rest(name)) for name in self.forward_outputs]
        return [f"{kind}:{name}" for kind, name in pairs if kind]

    def memory_of_changes(self, inputs: Sequence[Tensor]) -> frozenset[int]:
        """The addresses of forward inputs that a call changes."""
        if not self.changes:
            return frozenset()
        changed = {*self.changes}
        pairs = zip(self.forward_inputs, inputs, strict=True)
        return frozenset(_memory(value) for name, value in pairs if name in changed) - {0}

    @property
    def cut_positions(self) -> frozenset[int]:
        """The positions of the results that are `cut`."""
        return frozenset(int(_rest(name)) for name in self.cut)

    def inputs(self, params: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[Tensor]:
        """The forward graph's inputs, as local tensors of this rank."""
        return [
            others[name] if param is None else local(params[param])
            for name, param in zip(self.forward_inputs, self._param_of, strict=True)
        ]

    def run(self, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(results, saved), each in the order of `forward_outputs`, as local tensors of this
        rank."""
        outputs = _run(self.forward, inputs)
        results: list[Tensor] = []
        saved: list[Tensor] = []
        for is_saved, value in zip(self._is_saved, outputs, strict=True):
            (saved if is_saved else results).append(value)
        return results, saved

    def saved_params(self, leaves: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[int, ...]:
        """The positions in `params` of DTensors whose shard is saved. Ops on a DTensor increment
        its own version, not that of the shard, so it must be watched."""
        if self._saved_params is None:
            addresses = {_memory(tensor) for tensor in saved} - {0}
            positions = [
                k
                for k, leaf in enumerate(leaves)
                if isinstance(leaf, DTensor) and _memory(shard_of(leaf)) in addresses
            ]
            # Cached in a frozen dataclass: each call saves the same.
            object.__setattr__(self, "_saved_params", tuple(positions))
        assert self._saved_params is not None
        return self._saved_params

    def shown(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results as the user sees them."""
        pairs = zip(self.results, results, strict=True)
        return [output(value, self.places.get(name)) for name, value in pairs]


class RefrozenError(Exception):
    """Other parameters require gradients than did when the program was made."""


class PastCall(Protocol):
    """A record of a call, with which its forward can run again (`widening`)."""

    def watch(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """These inputs of the call must not change."""
        ...

    def rerun(self, positions: Collection[int]) -> tuple[Step, list[Tensor]]:
        """A step with gradients of the results at `positions` too, and the tensors that it
        saved."""
        ...


class _Context(FunctionCtx):
    """What `_Differentiable` keeps from forward to backward."""

    needs_input_grad: tuple[bool, ...]
    step: Step
    past: PastCall | None
    positions: tuple[str, ...]
    params: tuple[str, ...]
    saved: list[Tensor] | None
    versions: list[int]
    watched: list[tuple[str, Tensor, int]]
    blanks: dict[str, Tensor]
    leaves: tuple[Tensor, ...]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context,
        step: Step,
        others: Mapping[str, Tensor],
        past: PastCall | None,
        trained: tuple[bool, ...] | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        if trained is not None and ctx.needs_input_grad[-len(trained) :] != trained:
            raise RefrozenError
        inputs = step.inputs(dict(zip(step.params, leaves, strict=True)), others)
        if past is not None:
            past.watch(step.forward_inputs, inputs)
        changing = step.memory_of_changes(inputs)
        results, saved = step.run(inputs)
        ctx.past = past
        ctx.positions = step.positions
        ctx.params = step.params
        ctx.leaves = leaves
        ctx.watched = [
            (step.params[k], leaves[k], leaves[k]._version)
            for k in step.saved_params(leaves, saved)
        ]
        # A result's grad_fn refers to ctx: a result that is saved would keep itself alive.
        ids = {id(result) for result in results}
        # Tensors that the model changes in the call are saved as they were before.
        saved = [t.clone() if changing and _memory(t) in changing else t for t in saved]
        _save(ctx, step, [t.detach() if id(t) in ids else t for t in saved])
        ctx.set_materialize_grads(False)
        shown = step.shown(results)
        named = dict(zip(step.results, shown, strict=True))
        graded = {name: named[name] for name in step.graded}
        # A meta tensor holds the shape of a result without keeping its memory.
        ctx.blanks = {
            _rest(name): torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in graded.items()
        }
        ctx.mark_non_differentiable(*(named[n] for n in named if n not in graded))
        return tuple(shown)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context, *tangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        pairs = zip(ctx.positions, tangents, strict=True)
        given = {position: tangent for position, tangent in pairs if tangent is not None}
        if not given:
            return (None, None, None, None, *(None for _ in ctx.params))
        if ctx.saved is None:
            raise RuntimeError(_FREED)
        cut = [position for position in ctx.step.cut_positions if str(position) in given]
        if cut:
            assert ctx.past is not None
            _save(ctx, *ctx.past.rerun(cut))
        several = any(map(is_batched, given.values()))
        grads = one_by_one(_repeatable_gradients(ctx), given) if several else _gradients(ctx, given)
        return (None, None, None, None, *grads)


def _repeatable_gradients(ctx: _Context) -> Callable[[Mapping[str, Tensor]], list[Tensor | None]]:
    """`_gradients`, which can be called several times with the same saved tensors."""
    saved, past = ctx.saved, ctx.past

    def backward(given: Mapping[str, Tensor]) -> list[Tensor | None]:
        ctx.saved, ctx.past = saved, past
        return _gradients(ctx, given)

    return backward


def _gradients(ctx: _Context, given: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The gradients of all leaves, from those of results by position."""
    step, inputs = ctx.step, _backward_inputs(ctx, given)
    assert step.backward is not None
    pairs = zip(step.grads, _run(step.backward, inputs), strict=True)
    moves.backward()
    by_name = {name: grad for name, grad in pairs if step.is_reached(name, given)}
    return [
        _like(by_name.get(name), leaf) for name, leaf in zip(ctx.params, ctx.leaves, strict=True)
    ]


def _save(ctx: _Context, step: Step, saved: list[Tensor]) -> None:
    ctx.step, ctx.saved = step, saved
    ctx.versions = [tensor._version for tensor in saved]


def _backward_inputs(ctx: _Context, given: Mapping[str, Tensor]) -> list[Any]:
    assert ctx.saved is not None
    names = ctx.step.saves
    for name, tensor, version in zip(names, ctx.saved, ctx.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(_CHANGED.format(name=f"output {name} of its forward graph"))
    for name, leaf, version in ctx.watched:
        if leaf._version != version:
            raise RuntimeError(_CHANGED.format(name=name))
    by_name = dict(zip(names, ctx.saved, strict=True))
    if not keeps_graph():
        ctx.saved = ctx.past = None
    return [
        by_name[name] if name in by_name else _tangent(ctx, given, _rest(name))
        for name in ctx.step.backward_inputs
    ]


def _tangent(ctx: _Context, given: Mapping[str, Tensor], position: str) -> Tensor:
    """The incoming gradient of a result; zeros if the user's loss does not depend on it."""
    if position in given:
        compare_beside("the gradient that comes in for an output", [given[position]])
        return whole_of(given[position]).contiguous()
    return torch.zeros_like(ctx.blanks[position], device=next(iter(given.values())).device)


def local(param: Tensor) -> Tensor:
    """This rank's shard, detached: a node of its own in autograd's graph would take as long as a
    kernel."""
    return (shard_of(param) if isinstance(param, DTensor) else param).detach()


def _like(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A local gradient as the DTensor that its parameter is."""
    if grad is None or not isinstance(leaf, DTensor):
        return grad
    # With the layout of the parameter, which is contiguous, autograd uses it without a copy.
    return dtensor_like(grad.contiguous(), leaf)


def _run(graph: RunnableGraph, inputs: list[Any]) -> Sequence[Any]:
    """Run without autocast: its casts are in the graph since it was traced."""
    with torch.no_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return graph(inputs)


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _rest(name: str) -> str:
    return name.partition(":")[2]
