"""Ops that draw random numbers, with the states of the generator that they draw from.

Each op of torch that draws from the default generator may have two variants, which are defined when
a graph needs them. `autopar::draw_native_dropout` draws as `native_dropout` does, and also returns
the state that it started from. `autopar::redraw_native_dropout` takes such a state as its first
input. It draws the same numbers from it by the same kernel, and restores the generator.

Drawing and reading the state are one op, so that no compiler puts another draw between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.passes.recompute import STATE_BYTES
from autopar.runtime.generators import generator_state, replayed
from autopar.runtime.op_schemas import signature_of
from autopar.runtime.ops.operators import Operator

_GPU_STATE_BYTES = 16


@cache
def drawing(op: Any) -> Any:
    """The op that does what `op` does, and returns the state that it started from as its last
    result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        state = generator_state(_device(args, kwargs))
        return (*_several(op(*args, **kwargs)), state)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return (*_several(op(*args, **kwargs)), _fake_state(_device(args, kwargs)))

    given, result_types = signature_of(op)
    schema = f"({given}) -> ({', '.join([*result_types, 'Tensor'])})"
    return _defined(f"draw_{_name(op)}", schema, run, fake, (torch.Tag.nondeterministic_seeded,))


@cache
def redrawing(op: Any) -> Any:
    """The op that takes a state, and then all that `op` takes, and does what `op` does there."""

    def run(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        with replayed(state, _device(args, kwargs)):
            return op(*args, **kwargs)

    def fake(_: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    given, result_types = signature_of(op)
    returns = result_types[0] if len(result_types) == 1 else f"({', '.join(result_types)})"
    schema = f"({', '.join(filter(None, ('Tensor state', given)))}) -> {returns}"
    return _defined(f"redraw_{_name(op)}", schema, run, fake, ())


def _defined(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
) -> Any:
    """The op `autopar::name`. Draws have no gradient. Kernels are not chosen by the device of
    tensors: a GPU's state is on the host."""
    operator = Operator(f"{name}{schema}", run, tags)
    operator.register_fake(fake)
    return operator.op


def _name(op: Any) -> str:
    """Of `aten.bernoulli.p`, "bernoulli.p"; of `aten.rand.default`, "rand"."""
    return str(op).partition(".")[2].removesuffix(".default")


def _several(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """The device an op draws on: that of its tensors, or its `device` argument."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _fake_state(device: torch.device) -> Tensor:
    size = _GPU_STATE_BYTES if device.type == "cuda" else STATE_BYTES
    where = "meta" if device.type == "meta" else "cpu"
    return torch.empty(size, dtype=torch.uint8, device=where)
