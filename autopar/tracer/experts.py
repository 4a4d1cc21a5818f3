"""How the experts of a model become one op, `autopar::experts`, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.ops.experts import experts_op
from autopar.runtime.ops.gates import ACTIVATIONS, Gate

_NEAR, FAR = 4.0, 40.0
"""Gates are told apart by what they make of values up to these."""

_QUICK_GELU = 1.702


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    *,
    gated: bool = True,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """A layer of experts: `y[n] = sum over k of weights[n, k] * expert(chosen[n, k], x[n])`.

    `x` is [N, D], `chosen` [N, K] holds the numbers (int64, 0..E-1) of the experts that each token
    goes to, `weights` [N, K] what their outputs are multiplied by. `up` is [E, 2I, D], first the I
    rows of the gate, then those that it lets through: `expert(e, x) = down[e] @ (activation(gate) *
    passed)`; or, not `gated`, [E, I, D]. `down` is [E, D, I], `up_bias` [E, 2I] (or [E, I]),
    `down_bias` [E, D]. `activation` is one of silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh, or
    swish:F for x * sigmoid(F x). ValueError for any other.

    Differentiable in all floating-point arguments, on every device; no token is dropped. In a model
    given to autopar, tokens and experts can be sharded.
    """
    gates = 2 if gated else 1
    up = up.unflatten(1, (gates, -1))
    bias = None if up_bias is None else up_bias.unflatten(1, (gates, -1))
    return _call(x, chosen, weights, up, down, bias, down_bias, str(Gate.parse(activation)))


def _call(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, gate: str,
) -> Tensor:  # fmt: skip
    """The op, with `up` [E, G, I, D], and what `down_bias` adds: a matmul with each token's weights
    of the experts, so that the op stays linear in `down`."""
    found = experts_op(x, chosen, weights, up, down, up_bias, gate, False)
    if down_bias is None:
        return found
    table = weights.new_zeros(weights.shape[0], down_bias.shape[0])
    table = table.scatter_add(1, chosen, weights).to(down_bias.dtype)
    return found + table @ down_bias


class TransformersExperts:
    """An experts function as `transformers` wants it, for the modules of some models. Gates are
    told apart before tracing, by what they compute. What does not fit is left to the library's own
    grouped matmuls, which are planned as any other op."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._gates: dict[nn.Module, str | None] = {
            module: _gate_of(module)
            for model in models
            for module in model.modules()
            if hasattr(module, "_apply_gate") and hasattr(module, "has_gate")
        }

    def __call__(self, module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[N, D] of tokens `x` [N, D], the experts each goes to (`chosen` [N, K]) and their
        `weights` [N, K]."""
        gate = self._gates.get(module)
        if gate is None:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, chosen, weights)
        up, up_bias, down, down_bias = _weights_of(module)
        return call_as_cast(x, chosen, weights, up, down, up_bias, down_bias, gate)


def call_as_cast(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, gate: str,
) -> Tensor:  # fmt: skip
    """`_call` in the dtype of autocast, if there is one; the result in that of `x`."""
    result = x.dtype
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, up, down = (t.to(dtype) for t in (x, up, down))
        up_bias, down_bias = (None if t is None else t.to(dtype) for t in (up_bias, down_bias))
    return _call(x, chosen, weights, up, down, up_bias, down_bias, gate).to(result)


def _weights_of(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(up [E, G, I, D], up_bias [E, G, I], down [E, D, I], down_bias [E, D]), all views."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if not module.has_bias:
        return _gates_apart(module, up), None, down, None
    bias = _gates_apart(module, getattr(module, f"{name}_bias"))
    return _gates_apart(module, up), bias, down, module.down_proj_bias


def _gates_apart(module: Any, x: Tensor) -> Tensor:
    """[E, G * I, ...] as [E, G, I, ...]."""
    if not module.has_gate:
        return x.unsqueeze(1)
    if module.is_concatenated:
        return x.unflatten(1, (2, -1))
    return x.unflatten(1, (-1, 2)).transpose(1, 2)


def _gate_of(module: Any) -> str | None:
    """The text of what `module` does between its projections, found by trying; None if none of
    `_candidates` does it, or if it does more."""
    if module.has_post_expert_norm or module._is_expert_parallel:
        return None
    hidden = _probe(max((4 * limit for limit in _constants(module, _LIMITS)), default=FAR))
    flat = (hidden if module.is_concatenated else hidden.transpose(1, 2)).flatten(1)
    try:
        with torch.no_grad():
            expected = module._apply_gate(flat) if module.has_gate else module.act_fn(flat[:, :2])
    except Exception:  # whatever a module of the user's raises, its gate is none of ours
        return None
    given = hidden if module.has_gate else hidden[:, :1]
    for candidate in _candidates(module):
        found = candidate(given)
        if expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return str(candidate)
    return None


def _probe(far: float) -> Tensor:
    """[R, 2, 2]: pairs of values close to zero and up to `far`."""
    near = torch.linspace(-_NEAR, _NEAR, 17, device="cpu")
    line = torch.cat((near, torch.linspace(-far, far, 16, device="cpu")))
    return torch.cartesian_prod(line, line, near[::4]).flip(1)[:, [0, 1, 2, 1]].view(-1, 2, 2)


_LIMITS, _FACTORS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


def _constants(module: Any, names: tuple[str, ...]) -> list[float]:
    values = (vars(module).get(name) for name in names)
    return [float(v) for v in values if isinstance(v, int | float)]


def _candidates(module: Any) -> Iterator[Gate]:
    """Gates, those with the module's own constants first."""
    factors = dict.fromkeys((*_constants(module, _FACTORS), _QUICK_GELU))
    names = (*ACTIVATIONS, *(f"swish:{factor!r}" for factor in factors))
    limits = (*_constants(module, _LIMITS), None)
    return (Gate(name, limit, plus) for limit in limits for name in names for plus in (0.0, 1.0))
