"""Rerun of a call's forward, in its backward, by a program that has gradients of more outputs.

A program has gradients of the losses and of outputs that the user named alone: those of logits that
no one differentiates would cost memory and time. The first backward through another output makes a
program with its gradient. All inputs of the forward must still exist, or the backward is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.process.inputs import InputShard
from autopar.runtime.program.function import Step
from autopar.runtime.program.random import DefaultRandom

Autocast = Sequence[tuple[str, torch.dtype]]


class Ready(NamedTuple):
    """A program's step with what it runs on."""

    step: Step
    params: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    random: DefaultRandom | None


@dataclass(slots=True)
class Past:
    """All that a forward depended on. `given` are its tensors, which the model may have replaced by
    now, and `changed` the previous values of those it changed. `random` is the state it started
    from. `versions` has the tensors that must not change. `names` are those of the outputs, by
    position; `wider` makes the program with gradients of more outputs."""

    names: Sequence[str]
    wider: Callable[[frozenset[str]], Ready]
    given: Ready
    changed: Mapping[str, Tensor]
    random: Tensor | None
    autocast: Autocast
    versions: list[tuple[str, Tensor, int]] = field(default_factory=list[tuple[str, Tensor, int]])

    def watch(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """These tensors must not change."""
        self.versions += [
            (name, tensor, tensor._version)
            for name, tensor in zip(names, tensors, strict=True)
            if name not in self.changed and not tensor.is_inference()
        ]

    def rerun(self, positions: Collection[int]) -> tuple[Step, list[Tensor]]:
        """The program with gradients of the outputs at `positions` too, and what its forward saves
        for its backward. A collective call. AutoparError if that is impossible."""
        outputs = frozenset(self.names[position] for position in positions)
        for name, tensor, version in self.versions:
            if tensor._version != version:
                what = name.replace("param:", "parameter ").replace(":", " ")
                raise impossible(outputs, f"{what} was changed in place since")
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            step, params, others, random = self.wider(outputs)
        drawn = nullcontext()
        if self.random is not None and random is not None:
            drawn = random.replayed(self.random)
        with drawn:
            before = {name.removeprefix("param:"): x for name, x in self.changed.items()}
            # Another program may take other shards of inputs; these are from the call.
            buffers = {n: x for n, x in self.given.others.items() if not n.startswith("input:")}
            inputs = step.inputs(
                {**params, **self.given.params, **before}, {**others, **buffers, **self.changed}
            )
            return step, step.run(inputs)[1]


def remember(
    ready: Ready, leaves: Sequence[Any], names: Sequence[str], wider: Callable[..., Ready]
) -> Past:
    """A record of what the forward that `ready` is about to run depends on, for a call with these
    leaves."""
    step, params, others, random = ready
    there = {**others, **{f"param:{name}": param for name, param in params.items()}}
    changed = [name for name in step.changes if name in there]
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    past = Past(
        names,
        wider,
        ready,
        {name: there[name].detach().clone() for name in changed},
        random.now() if random is not None else None,
        [(device, torch.get_autocast_dtype(device)) for device in devices],
    )
    held = {
        f"input:{i}": leaf.local for i, leaf in enumerate(leaves) if isinstance(leaf, InputShard)
    }
    past.watch(tuple(held), tuple(held.values()))
    return past


def impossible(outputs: Collection[str], why: str) -> AutoparError:
    """The error for a forward that cannot run again."""
    return AutoparError(
        f"this backward goes through output {', '.join(sorted(outputs))} of a compiled model, of "
        f"which its program has no gradient, and the forward cannot be run again to get it: {why}. "
        "Name the output where the model is compiled: "
        f'autopar.compile(..., outputs={{"differentiable": {sorted(outputs)}}})'
    )
