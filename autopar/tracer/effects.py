"""Effects of forward that no graph holds: messages to other ranks, seeds, hooks on what autograd
saves. They are refused, with the code to write instead, or skipped where they change no result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Thread, current_thread
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.random
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from autopar.runtime.replacing import replaced
from autopar.tracer import torch_private
from autopar.tracer.one_rank import as_only_rank
from autopar.tracer.places import frames_of, is_users, users_call
from autopar.tracer.remedies import Refusal

_COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
)
"""Namespaces of the ops that talk to other ranks."""

COLLECTIVE_REMEDY = (
    "autopar computes on the global batch, so that what ranks would sum or gather is there "
    "already: leave the call out, and what divides by the number of ranks, or do both only without "
    "autopar: if not torch.compiler.is_compiling(): ..."
)


def is_collective(op: Any) -> bool:
    """Whether an op talks to other ranks."""
    return getattr(op, "namespace", "") in _COLLECTIVES


class Fakes(torch_private.FakeTensorMode):
    """Ops on fake tensors. One that does more than make its result is a Refusal."""

    supports_higher_order_operators = True
    refused: Refusal | None = None
    """The last one, which the model may have caught."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch_private.HigherOrderOperator):
            if func is torch_private.with_effects:
                self._refuse(args[1], args[2:])
            return torch_private.on_fakes(self, func, args, dict(kwargs or {}))
        if is_collective(func) or func is torch.ops.aten._linalg_check_errors.default:
            self._refuse(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def raise_refused(self) -> None:
        """Raise what the model may have caught."""
        if self.refused is not None:
            raise self.refused

    def _refuse(self, op: Any, args: tuple[Any, ...]) -> None:
        self.refused = _refusal(op, args)
        raise self.refused


def _refusal(op: Any, args: tuple[Any, ...]) -> Refusal:
    if is_collective(op):
        name = _collective(users_call()) or str(op)
        return Refusal(f"{name} talks to other ranks", COLLECTIVE_REMEDY)
    if op is torch.ops.aten._linalg_check_errors.default:
        name = args[1]
        return Refusal(
            f"{name} checks its result, which is known only when the model runs",
            f"take the function without checks ({name}_ex), whose last result says what is wrong",
        )
    return Refusal(
        f"{op} has effects beside its result",
        "a program does not have them: call it outside of forward",
    )


def _collective(frames: Iterable[FrameType]) -> str:
    """What users call the function of torch.distributed that runs in the first of `frames`, the
    outermost first; "" if it is none."""
    for frame in frames:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.distributed.distributed_c10d" and hasattr(dist, name):
            return f"torch.distributed.{name}"
        if module.startswith(("torch.distributed._functional_coll", "torch.distributed.nn")):
            return f"{module}.{name}"
    return ""


def collective_of(error: BaseException) -> str:
    """What users call the function of torch.distributed that `error` came from; "" if none."""
    frames = [frame for frame, _ in frames_of(error)]
    users = [i for i, frame in enumerate(frames) if is_users(frame.f_code.co_filename)]
    return _collective(frames[users[-1] :]) if users else ""


CONTROL_FLOW_REMEDY = (
    "a graph within the graph cannot be sharded: compute both sides and choose with "
    "torch.where(condition, a, b), or write a loop of Python"
)
_THREADS = "call the function itself, in the same thread"
_WATCHERS = frozenset({"tqdm._monitor"})
"""Threads that compute nothing: torch.fx itself shows bars of progress by tqdm."""
_SEEDS = (
    "a program draws from one stream that only the model advances: draw such numbers once, in "
    "__init__, and keep them in a buffer, or pass them as an argument; seed before the call"
)
_HOOKS = (
    "autopar decides what is saved for backward, and its graph has no hooks on it: leave them out; "
    'autopar.compile(..., memory={"saved_dtype": "bfloat16"}) saves in fewer bits, and '
    "memory.limit and memory.residency say where"
)


@contextmanager
def refused(model: nn.Module) -> Generator[None, None, None]:
    """Inside, a forward of `model` sees one rank, which has the batch of all. One that seeds
    torch's random numbers, or puts hooks on what autograd saves, is a Refusal. Those that move what
    is saved to the CPU and back change no result, and stay out."""
    enter = saved_tensors_hooks.__enter__

    def entered(self: saved_tensors_hooks) -> None:
        if type(self) is not save_on_cpu:
            name = f"torch.autograd.graph.{type(self).__name__}"
            raise Refusal(f"{name} changes what is saved for backward", _HOOKS)
        enter(self)

    start, tracing = Thread.start, current_thread()

    def started(self: Thread) -> None:
        calls = [frame.f_globals.get("__name__", "") for frame in users_call()]
        pooled = all(name.startswith(("concurrent.futures", __name__)) for name in calls)
        if current_thread() is tracing and pooled and type(self).__module__ not in _WATCHERS:
            raise Refusal("a thread is started, and what it computes is not traced", _THREADS)
        start(self)

    with replaced(
        (torch.random, "default_generator", _Seeded()),
        (saved_tensors_hooks, "__enter__", entered),
        # Its statistics are those of all ranks' rows, which are there.
        (nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward),
        (torch, "cond", _cond),
        (Thread, "start", started),
        *as_only_rank(model),
    ):
        yield


def without_inner_backward() -> AbstractContextManager[None]:
    """A forward, or a backward, that runs a backward is a Refusal: its gradients would be lost."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Refusal(
            "the model calls torch.autograd.backward, as reversible layers do: that adds gradients "
            "where no graph shows it",
            "take them from torch.autograd.grad(loss, tensors) instead, or use "
            "torch.utils.checkpoint to save memory",
        )

    return replaced((torch.autograd, "backward", refuse))


def _cond(*_: Any, **__: Any) -> Any:
    raise Refusal("torch.cond", CONTROL_FLOW_REMEDY)


class _Seeded:
    """The default generator, whose state forward may neither set nor read."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            called = _SEEDING.get(name, f"torch.default_generator.{name}")
            raise Refusal(f"{called} sets, or asks for, the state of random numbers", _SEEDS)

        return refuse


_SEEDING = {
    "manual_seed": "torch.manual_seed",
    "seed": "torch.seed",
    "initial_seed": "torch.initial_seed",
    "get_state": "torch.get_rng_state",
    "set_state": "torch.set_rng_state",
}
