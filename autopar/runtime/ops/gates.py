"""The function of experts between their two projections, as text: an activation, and its gating.

`hidden` is [R, G, I]. With G = 1 it is the activation alone: a = act(h0). With G = 2, h0 is the
gate and h1 its factor: a = act(min(h0, limit)) * (clamp(h1, -limit, limit) + plus). The text is
"silu", or with options "swish:1.702 limit=7.0 plus=1.0". Derivatives are written out, since
autograd does not record inside of ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""The function, and from (gradient, input) the gradient of the input."""


def _swish(factor: float) -> Activation:
    def backward(grad: Tensor, x: Tensor) -> Tensor:
        part = torch.sigmoid(factor * x)
        return grad * part * (1 + factor * x * (1 - part))

    return lambda x: x * torch.sigmoid(factor * x), backward


ACTIVATIONS: dict[str, Activation] = {
    "silu": (F.silu, aten.silu_backward.default),
    "gelu": (F.gelu, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward.default(grad, x, approximate="tanh"),
    ),
    "relu": (F.relu, lambda grad, x: grad * (x > 0)),
    "relu2": (lambda x: F.relu(x).square(), lambda grad, x: grad * 2 * F.relu(x)),
    "sigmoid": (torch.sigmoid, lambda grad, x: grad * torch.sigmoid(x) * torch.sigmoid(-x)),
    "tanh": (torch.tanh, lambda grad, x: grad * (1 - torch.tanh(x).square())),
}
"""By name; besides, "swish:F" is x * sigmoid(F * x)."""


@dataclass(frozen=True, slots=True)
class Gate:
    """An activation, the `limit` on its inputs (None: no limit), and `plus`, which is added to the
    factor of the gate."""

    activation: str
    limit: float | None = None
    plus: float = 0.0

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" limit={self.limit!r}"
        return self.activation + limit + (f" plus={self.plus!r}" if self.plus else "")

    @staticmethod
    def parse(text: str) -> Gate:
        """ValueError if there is no such gate."""
        name, *options = text.split()
        try:
            given = {key: float(value) for key, value in (o.split("=") for o in options)}
            gate = Gate(name, **given)
            _activation(name)
        except (TypeError, KeyError, ValueError):
            known = ", ".join(sorted(ACTIVATIONS))
            raise ValueError(
                f"no gate {text!r}: write one of {known}, swish:FACTOR, and if need be limit=X and "
                "plus=X behind it"
            ) from None
        return gate

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, I] of `hidden` [R, G, I]."""
        function, _ = _activation(self.activation)
        gate = hidden[:, 0]
        if hidden.shape[1] == 1:
            return function(gate)
        return function(self._low(gate)) * self._passed(hidden[:, 1])

    def backward(self, grad: Tensor, hidden: Tensor) -> Tensor:
        """The gradient of `hidden` from that of the output."""
        function, derivative = _activation(self.activation)
        gate = hidden[:, 0]
        if hidden.shape[1] == 1:
            return derivative(grad, gate).unsqueeze(1)
        low, up = self._low(gate), hidden[:, 1]
        of_gate = derivative(grad * self._passed(up), low)
        of_up = grad * function(low)
        if self.limit is not None:
            of_gate = of_gate * (gate <= self.limit)
            of_up = of_up * (up.abs() <= self.limit)
        return torch.stack((of_gate, of_up), 1)

    def _low(self, gate: Tensor) -> Tensor:
        return gate if self.limit is None else gate.clamp(max=self.limit)

    def _passed(self, up: Tensor) -> Tensor:
        up = up if self.limit is None else up.clamp(-self.limit, self.limit)
        return up + self.plus if self.plus else up


def _activation(name: str) -> Activation:
    if name.startswith("swish:"):
        return _swish(float(name.removeprefix("swish:")))
    return ACTIVATIONS[name]
