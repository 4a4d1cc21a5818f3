"""One true step of a model, forward and backward on torch's meta device, as a stream of ops.

Nothing is traced, so that it is cheap: `find` reads from it which blocks execute alike. An op's
*kind* is all of its call but the identity of tensors: the op, scalars, shapes, strides, dtypes. Its
`reads` say which tensors these are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.tracer import torch_private
from autopar.tracer.effects import is_collective
from autopar.tracer.stand_ins import meta_tensor
from autopar.tracer.wrappers import region


class Unrecordable(Exception):
    """The step cannot be recorded: the model is traced as it is."""


class Recorded(NamedTuple):
    """A tensor: result `output` of op `op`, or the one with `name` that exists before the step."""

    op: int
    output: int
    name: str = ""


@dataclass
class Recording:
    """Kinds and reads of every op; those from `forward` on are backward. `visits` has the ops of
    each call of a watched block, `entered` the first backward op of one whose outputs have a
    gradient. `results` are the tensors that leave the step: "output I", "grad NAME"."""

    kinds: list[int] = field(default_factory=list[int])
    reads: list[tuple[Recorded, ...]] = field(default_factory=list[tuple[Recorded, ...]])
    forward: int = 0
    visits: dict[str, list[range]] = field(default_factory=dict[str, list[range]])
    entered: dict[str, int] = field(default_factory=dict[str, int])
    results: dict[str, Recorded | None] = field(default_factory=dict[str, Recorded | None])


Kinds = dict[Hashable, int]
"""The number of every kind; recordings that are compared share one."""


class Recorder(torch_private.TorchDispatchMode):
    """Records every op that is dispatched inside."""

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self.recording = Recording()
        self._kinds = kinds
        self._results: dict[int, Any] = {}
        self._values: dict[int, Recorded] = {}
        self._stored: dict[Hashable, Recorded] = {}
        self._alive: list[Any] = []

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a `tensor` that exists before the step."""
        self._know(tensor, Recorded(-1, 0, name))

    def value(self, tensor: Tensor) -> Recorded:
        """The record of a tensor. Results of ops that autograd saves come back as other objects on
        the same memory."""
        recorded = self._values.get(id(tensor))
        if recorded is None:
            recorded = self._stored.get(_place(tensor))
            if recorded is None:
                raise Unrecordable("a tensor that no recorded op made")
            self._values[id(tensor)] = recorded
            self._alive.append(tensor)
        return recorded

    def _know(self, tensor: Tensor, value: Recorded) -> None:
        if id(tensor) not in self._values:
            self._values[id(tensor)] = value
            self._stored.setdefault(_place(tensor), value)
            self._alive.append(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if is_collective(func):
            raise Unrecordable("an op that talks to other ranks")
        reads: list[Recorded] = []
        given = self._form(args, reads), self._form(tuple((kwargs or {}).items()), reads)
        # The stand-ins of a trace are on the CPU, and cast as autocast there says.
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        kind = self._kinds.setdefault((func, casts, region(), given), len(self._kinds))
        result = self._call(kind, func, args, kwargs or {})
        index = len(self.recording.kinds)
        self.recording.kinds.append(kind)
        self.recording.reads.append(tuple(reads))
        for output, tensor in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if isinstance(tensor, Tensor):
                self._know(tensor, Recorded(index, output))
        return result

    def _call(self, kind: int, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The op's result. If it was called before with the same `kind`, these are new tensors like
        the first results."""
        if kind in self._results:
            like = self._results[kind]
            return _reissued(like) if isinstance(like, tuple) else func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._results[kind] = _likeness(result) if torch_private.is_functional(func) else None
        return result

    def _form(self, value: Any, reads: list[Recorded]) -> Hashable:
        if isinstance(value, Tensor):
            reads.append(self.value(value))
            return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
        if isinstance(value, tuple | list):
            return tuple(self._form(item, reads) for item in value)
        if isinstance(value, float):
            return "float", value.hex()
        return type(value), value


def _place(tensor: Tensor) -> Hashable:
    """Where a tensor is, and which part of what is there."""
    return (
        torch_private.storage_of(tensor),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _likeness(result: Any) -> Any:
    """What `_reissued` needs to make such results; None if it cannot."""
    if isinstance(result, Tensor):
        return "tensor", tuple(result.shape), result.stride(), result.dtype
    if isinstance(result, tuple | list) and all(isinstance(x, Tensor) or x is None for x in result):
        return type(result), [None if x is None else _likeness(x) for x in result]
    return None


def _reissued(like: tuple[Any, ...]) -> Any:
    if like[0] == "tensor":
        _, shape, stride, dtype = like
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    kind, items = like
    return kind(None if item is None else _reissued(item) for item in items)


def record(
    step: nn.Module,
    tensors: Sequence[Tensor],
    states: Mapping[str, Tensor],
    blocks: Mapping[nn.Module, str],
    kinds: Kinds,
) -> Recording:
    """One step of `step(*tensors)`: its outputs, and the gradients of the parameters among `states`
    for gradients of all outputs. Everything is meta tensors. `blocks` are watched, under their
    names.

    Unrecordable where ops read tensors that nobody knows; and whatever the model raises.
    """
    recorder = Recorder(kinds)
    for i, tensor in enumerate(tensors):
        recorder.name(tensor, f"input {i}")
    for name, tensor in states.items():
        recorder.name(tensor, name)
    recording = recorder.recording
    handles = _watch(blocks, recording)
    try:
        with torch.device("meta"), recorder:
            outputs = step(*tensors)
        recording.forward = len(recording.kinds)
        for i, output in enumerate(outputs):
            recording.results[f"output {i}"] = recorder.value(output)
        graded = [x for x in outputs if x.requires_grad]
        trained = {name: x for name, x in states.items() if x.requires_grad}
        if graded and trained:
            seeds = [meta_tensor(x) for x in graded]
            for i, seed in enumerate(seeds):
                recorder.name(seed, f"tangent {i}")
            with torch.device("meta"), recorder:
                grads = torch.autograd.grad(graded, [*trained.values()], seeds, allow_unused=True)
            for name, grad in zip(trained, grads, strict=True):
                recording.results[f"grad {name}"] = None if grad is None else recorder.value(grad)
    finally:
        for handle in handles:
            handle.remove()
    return recording


def _watch(blocks: Mapping[nn.Module, str], recording: Recording) -> list[Any]:
    """Hooks that record when each block is called, and when its backward begins."""
    started: list[int] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        started.append(len(recording.kinds))

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        name = blocks[module]
        recording.visits.setdefault(name, []).append(range(started.pop(), len(recording.kinds)))

        def arrive(_grad: Tensor) -> None:
            recording.entered.setdefault(name, len(recording.kinds))

        for tensor in torch_private.tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(arrive)

    handles: list[Any] = [m.register_forward_pre_hook(enter, prepend=True) for m in blocks]
    return handles + [block.register_forward_hook(leave) for block in blocks]
