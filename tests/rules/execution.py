"""Rules by execution: shard the inputs as a rule allows, run the op on every rank, put the pieces
together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

import autopar.runtime.ops.attention
import autopar.runtime.ops.chunked_loss
import autopar.runtime.ops.experts
import autopar.runtime.ops.recurrent  # noqa: F401 - all register ops
from autopar.codegen.sources import localize
from autopar.ir.graph import Arg, Ref
from autopar.rules.notation import Call, Dims, Rule, TensorShape
from autopar.rules.op import Shapes

Ways = dict[str, int]
"""Among how many ranks each letter is sharded."""


def resolve(op: str) -> Callable[..., Any]:
    """The function an op name means."""
    if op == "getitem":
        return lambda x: x
    namespace, packet, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor, Tensor | None]:
    """What the op computes on CUDA: it has no CPU kernel."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    scaled = grad if weight is None else grad * weight
    normal = x * rstd
    dx = rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
    rest = tuple(range(x.dim() - len(shape)))
    return dx, (grad * normal).sum(rest) if mask[1] else None


def call_op(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The op's tensor outputs; an empty one stands for one that a mask leaves out."""
    function = _rms_norm_backward if "_fused_rms_norm_backward" in str(target) else target
    found = function(*args, **kwargs)
    outputs = found if isinstance(found, tuple | list) else (found,)
    return tuple(torch.empty(0) if o is None else o for o in outputs)


def snapshot(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """The call as rules see it, and its tensor inputs in order."""
    tensors: list[Tensor] = []

    def convert(value: Any) -> Arg:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Ref(len(tensors) - 1)
        if isinstance(value, list | tuple):
            return tuple(convert(v) for v in value)
        return str(value) if isinstance(value, torch.dtype) else value

    converted = tuple(convert(a) for a in args)
    keywords = tuple((name, convert(value)) for name, value in kwargs.items())
    outputs = call_op(resolve(op), args, kwargs)
    return (
        Call(op, converted, keywords, tuple(map(_type, tensors)), tuple(map(_type, outputs))),
        tensors,
    )


def _type(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def substitute(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with their tensors, in order of appearance, replaced by `tensors`."""
    rest = iter(tensors)

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor):
            return next(rest)
        return type(item)(map(walk, item)) if isinstance(item, list | tuple) else item

    return tuple(map(walk, args)), {name: walk(value) for name, value in kwargs.items()}


def letter_sizes(rule: Rule, call: Call) -> dict[str, int]:
    sizes = dict(rule.sizes)
    for dims, tensor in zip(
        (*rule.inputs, *rule.outputs), (*call.inputs, *call.outputs), strict=True
    ):
        for dim, size in zip(dims, tensor.shape, strict=True):
            if len(dim) == 1:
                sizes[dim[0]] = size
    return sizes


def shard(x: Tensor, dims: Dims, sizes: dict[str, int], ways: Ways, rank: dict[str, int]) -> Tensor:
    """The piece of `x` that `rank` (a coordinate per sharded letter) holds."""
    names = [a for dim in dims for a in dim]
    split = x.reshape([sizes[a] for a in names])
    for position, name in enumerate(names):
        if name in ways:
            split = split.chunk(ways[name], position)[rank[name]]
    shape = [prod(sizes[a] // ways.get(a, 1) for a in dim) for dim in dims]
    return split.reshape(shape).clone()


def run_sharded(
    call: Call, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Tensor],
    ways: Ways,
) -> list[Tensor]:  # fmt: skip
    """The outputs, put together from those of every rank."""
    sizes = letter_sizes(rule, call)

    def local(tensors: tuple[Dims, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(prod(sizes[a] // ways.get(a, 1) for a in dim) for dim in dims) for dims in tensors
        )

    shapes = Shapes(
        call.shapes, tuple(o.shape for o in call.outputs), local(rule.inputs), local(rule.outputs)
    )
    target, new_args, new_kwargs = localize(resolve(call.op), args, kwargs, shapes)
    gathered: list[Tensor | None] = [None] * len(call.outputs)
    for coordinate in product(*(range(n) for n in ways.values())):
        rank = dict(zip(ways, coordinate, strict=True))
        pieces = [
            shard(x, dims, sizes, ways, rank) for x, dims in zip(inputs, rule.inputs, strict=True)
        ]
        outputs = call_op(target, *substitute(new_args, new_kwargs, pieces))
        for k, output in enumerate(outputs):
            assert tuple(output.shape) == shapes.local_outputs[k], (call.op, ways, output.shape)
            gathered[k] = _gather(gathered[k], output, rule, k, sizes, ways, rank)
    return [x for x in gathered if x is not None]


def _gather(
    whole: Tensor | None, piece: Tensor, rule: Rule, k: int, sizes: dict[str, int], ways: Ways,
    rank: dict[str, int],
) -> Tensor:  # fmt: skip
    """`whole` with `shard` added where `rank` holds it: concatenation and sum at once."""
    dims = rule.outputs[k]
    names = [a for dim in dims for a in dim]
    shape = [prod(sizes[a] for a in dim) for dim in dims]
    if piece.dtype == torch.bool:
        assert set(ways) <= set(names), "a partial bool"
    if rule.mean:
        piece = piece / prod(n for a, n in ways.items() if a not in names)
    if whole is None:
        whole = torch.zeros(shape, dtype=piece.dtype)
    view = whole.view([sizes[a] for a in names])
    for position, name in enumerate(names):
        if name in ways:
            view = view.chunk(ways[name], position)[rank[name]]
    view += piece.reshape(view.shape)
    return whole


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype, f"{what}: output {k} is {a.dtype}, not {b.dtype}"
        exact = not (a.dtype.is_floating_point or a.dtype.is_complex)
        scale = 0.0 if exact or not b.numel() else float(b.abs().nan_to_num(0, 0, 0).max())
        near = 1e-5 if a.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            a, b, rtol=0 if exact else near, atol=near * scale, equal_nan=True,
            msg=lambda text, k=k: f"{what}: output {k}: {text}",
        )  # fmt: skip
