"""One step of a compiled program as one node of autograd.

Both graphs take their inputs as a list that they clear, so that a tensor is freed at its last use.
What the forward graph saves goes to the backward graph by reference, outside of autograd's own
saved tensors, which would keep all of it until the backward graph has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from autopar.runtime.doors import dtensor_like, keeps_graph

Graph = Callable[[list[Any]], Sequence[Any]]
"""A graph over local tensors; it may clear the list it is given."""

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
    "compiled model (output {name} of its forward graph)"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A program as it runs on this rank.

    Names are `codegen.Program`'s: inputs `param:NAME`, `buffer:NAME`, `input:I`; outputs
    `loss:POS`, `value:POS`, `detached:POS`, `mutation:NAME`, `saved:K`; backward inputs `saved:K`,
    `tangent:POS`; backward outputs `grad:NAME`. `backward` is None if there is nothing to
    differentiate.
    """

    forward: Graph
    backward: Graph | None
    forward_inputs: tuple[str, ...]
    forward_outputs: tuple[str, ...]
    backward_inputs: tuple[str, ...] = ()
    backward_outputs: tuple[str, ...] = ()

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters that the forward graph reads or the backward graph has a gradient
        of, in a fixed order."""
        names = [name for name in self.forward_inputs if name.startswith("param:")]
        names += [f"param:{_rest(name)}" for name in self.backward_outputs]
        return tuple(_rest(name) for name in dict.fromkeys(names))

    @property
    def results(self) -> tuple[str, ...]:
        """The forward outputs that are not saved for backward."""
        return tuple(n for n in self.forward_outputs if _kind(n) != "saved")

    def __call__(
        self, params: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The results by name. `params` are parameters by name, plain or DTensors stored as the
        program expects, which receive gradients of their kind; `others` are buffers and inputs
        under their names in `forward_inputs`."""
        if self.backward is None or not torch.is_grad_enabled():
            values, _ = _run_forward(self, params, others)
        else:
            leaves = (params[name] for name in self.params)
            values = _Differentiable.apply(self, others, *leaves)
        return dict(zip(self.results, values, strict=True))


class _Context(FunctionCtx):
    """What `_Differentiable` keeps from forward to backward."""

    step: Step
    saved: list[Tensor] | None
    versions: list[int]
    blanks: dict[str, Tensor]
    leaves: tuple[Tensor, ...]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context, step: Step, others: Mapping[str, Tensor], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        params = dict(zip(step.params, leaves, strict=True))
        results, saved = _run_forward(step, params, others)
        ctx.step = step
        ctx.leaves = leaves
        # A result's grad_fn leads to ctx: a saved tensor that is one would keep itself alive.
        ids = {id(result) for result in results}
        ctx.saved = [t.detach() if id(t) in ids else t for t in saved]
        ctx.versions = [tensor._version for tensor in saved]
        ctx.set_materialize_grads(False)
        named = dict(zip(step.results, results, strict=True))
        # A meta tensor holds the shape of a result without keeping its memory.
        ctx.blanks = {
            name: torch.empty_like(value, device="meta")
            for name, value in named.items()
            if _kind(name) in ("loss", "value")
        }
        ctx.mark_non_differentiable(*(named[n] for n in named if n not in ctx.blanks))
        return tuple(results)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: _Context, *tangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        step = ctx.step
        if all(tangent is None for tangent in tangents):
            return (None, None, *(None for _ in step.params))
        given = dict(zip((_rest(n) for n in step.results), tangents, strict=True))
        inputs = _backward_inputs(ctx, given)
        assert step.backward is not None
        grads = _run(step.backward, inputs)
        by_name = dict(zip((_rest(n) for n in step.backward_outputs), grads, strict=True))
        leaves = zip(step.params, ctx.leaves, strict=True)
        return (None, None, *(_like(by_name.get(name), leaf) for name, leaf in leaves))


def _backward_inputs(ctx: _Context, given: Mapping[str, Tensor | None]) -> list[Any]:
    if ctx.saved is None:
        raise RuntimeError(_FREED)
    names = [n for n in ctx.step.forward_outputs if _kind(n) == "saved"]
    for name, tensor, version in zip(names, ctx.saved, ctx.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(_CHANGED.format(name=name))
    by_name = dict(zip(names, ctx.saved, strict=True))
    if not keeps_graph():
        ctx.saved = None
    inputs: list[Any] = []
    for name in ctx.step.backward_inputs:
        if _kind(name) == "saved":
            inputs.append(by_name[name])
        else:
            inputs.append(_tangent(ctx, given, _rest(name)))
    return inputs


def _tangent(ctx: _Context, given: Mapping[str, Tensor | None], position: str) -> Tensor:
    """The gradient that came in for a result; zeros if the user's loss does not depend on it."""
    tangent = given[position]
    blank = next(b for name, b in ctx.blanks.items() if _rest(name) == position)
    if tangent is None:
        device = next(t.device for t in given.values() if t is not None)
        return torch.zeros_like(blank, device=device)
    return tangent.contiguous()


def _run_forward(
    step: Step, params: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """(results, saved), each in the order of `forward_outputs`."""
    inputs = [
        _local(params[_rest(name)]) if _kind(name) == "param" else others[name]
        for name in step.forward_inputs
    ]
    outputs = _run(step.forward, inputs)
    results: list[Tensor] = []
    saved: list[Tensor] = []
    for name, value in zip(step.forward_outputs, outputs, strict=True):
        (saved if _kind(name) == "saved" else results).append(value)
    return results, saved


def _local(param: Tensor) -> Tensor:
    """This rank's piece. Without a step of its own in autograd's graph, which costs as much as many
    a kernel."""
    if not isinstance(param, DTensor):
        return param.detach()
    with torch.no_grad():
        return param.to_local().detach()


def _like(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A local gradient as the DTensor that its parameter is."""
    if grad is None or not isinstance(leaf, DTensor):
        return grad
    # Laid out as the parameter is, which is contiguous, autograd keeps it without a copy.
    return dtensor_like(grad.contiguous(), leaf)


def _run(graph: Graph, inputs: list[Any]) -> Sequence[Any]:
    """The casts of autocast are in the graph since it was traced: it must not cast again."""
    with torch.no_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return graph(inputs)


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _rest(name: str) -> str:
    return name.partition(":")[2]
