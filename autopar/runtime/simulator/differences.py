"""How far one step is from another, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import torch
from torch import Tensor

from autopar.runtime.simulator.comparison import EXACT_TOLERANCE, Unequal

NEGLIGIBLE = 1e-2
"""Differences of gradients are relative to at least this share of the largest gradient. One that is
zero except for rounding (a bias that softmax cancels) has no precision of its own."""

ROUNDED = 1e-6
"""Tensors are equal if they differ in float64 by less than this share of the rounding in the step's
own dtype, however small they are."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The results of one forward and backward, as whole tensors: outputs by their position;
    buffers, parameters and gradients afterwards by name. `ends` are the outputs that are
    differentiated, `changed` the buffers and parameters that have other values than before."""

    outputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    parameters: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradients: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    ends: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def named(self) -> dict[str, Tensor]:
        """All tensors, by their names in a report."""
        return (
            {f"output {name}{_kind(x)}": x for name, x in self.outputs.items()}
            | self.states()
            | {_gradient(name): x for name, x in self.gradients.items()}
        )

    def states(self) -> dict[str, Tensor]:
        """Buffers and parameters, by their names in a report."""
        return {f"buffer {name}": x for name, x in self.buffers.items()} | {
            f"parameter {name}": x for name, x in self.parameters.items()
        }


def _kind(output: Tensor) -> str:
    return " (loss)" if output.dim() == 0 and output.is_floating_point() else ""


def _gradient(name: str) -> str:
    return f"gradient of {name}"


def differences(
    simulated: SimulatedStep, eager: SimulatedStep, noise: Mapping[str, float] | None = None
) -> tuple[Unequal, ...]:
    """How far `simulated` is from `eager`: outputs and states first, then gradients, the worst
    first in each. A tensor that only one of the two has is infinitely far; a state counts if eager
    changes it and `simulated` does not have it. `noise` is the difference by rounding alone, by the
    tensor's name in the report."""
    largest = max((_largest(grad) for grad in eager.gradients.values()), default=0.0)
    here, there = simulated.named(), eager.named()
    gradients = {_gradient(name) for step in (simulated, eager) for name in step.gradients}
    compared: list[Unequal] = []
    unchanged = {name for name in eager.states() if name.partition(" ")[2] not in eager.changed}
    for name in dict.fromkeys([*there, *here]):
        if name in unchanged and name not in here:
            continue
        floor = NEGLIGIBLE * largest if name in gradients else 0.0
        floor = max(floor, (noise or {}).get(name, 0.0) * ROUNDED / EXACT_TOLERANCE)
        compared.append(_difference(name, here.get(name), there.get(name), floor))
    compared += (
        Unequal(f"gradient through output {name}", inf, 0.0, "in eager alone")
        for name in sorted(eager.ends - simulated.ends)
    )
    compared.sort(key=lambda d: (d.name in gradients, -d.relative, d.name))
    return tuple(compared)


def tensor_distances(a: SimulatedStep, b: SimulatedStep) -> dict[str, float]:
    """The largest difference of the elements of each tensor that both have; 0 if not finite."""
    here, there = a.named(), b.named()
    distances = {name: _distance(here[name], there[name]) for name in here if name in there}
    return {name: distance if isfinite(distance) else 0.0 for name, distance in distances.items()}


def with_exact(measured: tuple[Unequal, ...], exact: tuple[Unequal, ...]) -> tuple[Unequal, ...]:
    """`measured`, and how far the same tensors are from one another in float64."""
    known = {difference.name: difference.relative for difference in exact}
    return tuple(replace(d, exact=known.get(d.name, inf)) for d in measured)


def _difference(name: str, simulated: Tensor | None, eager: Tensor | None, floor: float) -> Unequal:
    if simulated is None or eager is None:
        which, tensor = ("eager", eager) if simulated is None else ("the compiled model", simulated)
        return Unequal(name, inf, _largest(tensor), f"in {which} alone")
    largest = _largest(eager)
    if simulated.shape != eager.shape:
        return Unequal(name, inf, largest, f"{list(simulated.shape)} for {list(eager.shape)}")
    distance = _distance(simulated, eager)
    scale = max(largest, floor)
    return Unequal(name, distance / scale if scale else (inf if distance else 0.0), largest)


def _distance(simulated: Tensor, eager: Tensor) -> float:
    if simulated.shape != eager.shape:
        return inf
    a, b = _wide(simulated), _wide(eager)
    if not a.numel():
        return 0.0
    same = (a == b) | ((a != a) & (b != b))
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=inf).max().item()


def _wide(tensor: Tensor) -> Tensor:
    """On the CPU, in the widest dtype of its kind."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide)


def _largest(tensor: Tensor | None) -> float:
    """The largest finite magnitude."""
    if tensor is None:
        return 0.0
    magnitudes = _wide(tensor).abs()
    finite = magnitudes[magnitudes.isfinite()]
    return finite.max().item() if finite.numel() else 0.0
