"""How the experts of a model become one op, `autopar::experts`, while it is traced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.ops.experts import experts_op
from autopar.runtime.ops.gates import ACTIVATIONS, Gate

_NEAR, FAR = 4.0, 40.0
"""Gates are identified by their outputs for values up to these."""

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
    """The op, with `up` [E, G, I, D], plus the term of `down_bias`: a matmul with each token's
    weights of the experts, so that the op stays linear in `down`."""
    output = experts_op(x, chosen, weights, up, down, up_bias, gate, False)
    if down_bias is None:
        return output
    table = weights.new_zeros(weights.shape[0], down_bias.shape[0])
    table = table.scatter_add(1, chosen, weights).to(down_bias.dtype)
    return output + table @ down_bias


class TransformersExperts:
    """An experts function with the interface of `transformers`, for the modules of some models.
    Gates are identified before tracing, by their outputs. Modules that do not fit use the library's
    own grouped matmuls, which are planned as any other op."""

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
    """The text of the gate between the projections of `module`, identified by its outputs. None if
    none of `_candidates` has the same, or if the module does more."""
    if module.has_post_expert_norm or module._is_expert_parallel:
        return None
    hidden = _probe(max((4 * limit for limit in _constants(module, _LIMITS)), default=FAR))
    flat = (hidden if module.is_concatenated else hidden.transpose(1, 2)).flatten(1)
    try:
        with torch.no_grad():
            target = module._apply_gate(flat) if module.has_gate else module.act_fn(flat[:, :2])
    except Exception:  # whatever a user's module raises, its gate is no candidate
        return None
    given = hidden if module.has_gate else hidden[:, :1]
    for candidate in _candidates(module):
        actual = candidate(given)
        if target.shape == actual.shape and torch.allclose(actual, target, rtol=1e-5, atol=1e-6):
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


# Layers of experts of `transformers` that loop over the experts that have tokens, as one op.
#
# Which experts have tokens, and how many, is known only when a model runs. These families are
# recognised by the attributes of their modules.

Forward = Callable[..., Any]


def looped(module: nn.Module) -> Forward | None:
    """A forward that computes what that of `module` does, if it is of a known family."""
    if not type(module).__module__.startswith("transformers."):
        return None
    return next((forward for family in _FAMILIES if (forward := family(module))), None)


def _holds(module: Any, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def _with_identities(module: Any) -> Forward | None:
    """The forward of experts of which the last ones are identities (those of LongcatFlash, a loop
    over the experts that have tokens); None for a module that is no such layer."""
    names = ("gate_up_proj", "down_proj", "act_fn", "identity_expert", "num_routed_experts")
    gate = _activation(module.act_fn) if _holds(module, *names) else None
    if gate is None:
        return None
    count = module.num_routed_experts

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        is_identity = chosen >= count
        up = module.gate_up_proj[:count].unflatten(1, (2, -1))
        routed, numbers = weights.masked_fill(is_identity, 0), chosen.clamp(max=count - 1)
        y = call_as_cast(x, numbers, routed, up, module.down_proj, None, None, gate)
        return y + x * weights.masked_fill(~is_identity, 0).sum(-1, keepdim=True).to(x.dtype)

    return forward


def _in_rows(module: Any) -> Forward | None:
    """Experts whose weights are one below the other in matrices (those of DBRX)."""
    mlp: Any = getattr(module, "mlp", None)
    names = ("w1", "v1", "w2", "activation_fn")
    known = _holds(module, "ffn_hidden_size", "num_experts") and _holds(mlp, *names)
    gate = _activation(mlp.activation_fn) if known else None
    if gate is None:
        return None

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        w1, v1, w2 = (w.unflatten(0, (module.num_experts, -1)) for w in (mlp.w1, mlp.v1, mlp.w2))
        up = torch.stack((w1, v1), 1)
        y = call_as_cast(
            x.flatten(0, -2), chosen, weights, up, w2.transpose(1, 2), None, None, gate
        )
        return y.view(x.shape[0], -1, x.shape[-1])

    return forward


def _sorting_router(module: Any) -> Forward | None:
    """A router that sorts tokens by expert, and returns a list of the tokens per expert (that of
    JetMoe): here the list is a tensor."""
    if not _holds(module, "num_experts", "top_k", "layer", "input_size"):
        return None

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        logits = module.layer(x).float()
        best, chosen = logits.topk(module.top_k, dim=1)
        numbers, weights = chosen.flatten(), best.softmax(1).type_as(x).flatten()
        order = numbers.argsort()
        counts = (numbers.unsqueeze(1) == torch.arange(module.num_experts, device=x.device)).sum(0)
        return order, order // module.top_k, weights[order], counts, logits

    return forward


def _is_sorted_linear(module: Any) -> bool:
    known = _holds(module, "num_experts", "input_size", "output_size", "weight")
    return known and module.weight.dim() == 3


def _sorted_linear(module: Any) -> Forward | None:
    """A linear layer per expert, of tokens that are sorted by expert (that of JetMoe)."""
    if not _is_sorted_linear(module):
        return None

    def forward(rows: Tensor, counts: Tensor) -> Tensor:
        library: Any = sys.modules["transformers.integrations.moe"]
        return library._grouped_linear(rows, module.weight, counts.cumsum(0).int())

    return forward


def _of_sorted_linears(module: Any) -> Forward | None:
    """Experts of two such layers with an activation between them (those of JetMoe)."""
    into: Any
    out_of: Any
    into, out_of = (getattr(module, f"{name}_linear", None) for name in ("input", "output"))
    linear = _is_sorted_linear(into) and _is_sorted_linear(out_of)
    known = linear and _holds(module, "activation", "router", "bias")
    gate = _activation(module.activation) if known else None
    if gate is None:
        return None

    def forward(tokens: Tensor) -> Tensor:
        x = tokens.flatten(0, -2)
        best, chosen = module.router(x)[-1].topk(module.router.top_k, dim=1)
        weights, up = best.softmax(1).type_as(x), into.weight.unflatten(1, (2, -1))
        y = call_as_cast(x, chosen, weights, up, out_of.weight, None, None, gate)
        return y.view_as(tokens) + module.bias

    return forward


def _of_modules(module: nn.Module) -> Forward | None:
    """The forward of experts that are modules of their own (those of SwitchTransformers). None for
    a module that is no such layer, or that has dropout (`dropout_of_experts`)."""
    experts = _experts(module)
    parts = [part for part in map(_parts, experts) if part is not None]
    kinds = {gate for _, _, gate in parts}
    if len(parts) != len(experts) or len(kinds) != 1 or dropout_of_experts(module):
        return None
    ups, downs = [up for up, _, _ in parts], [down for _, down, _ in parts]

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if chosen.dim() == 3:  # [N, 1, E]: one-hot, or zeros for a token that no expert takes
            weights, chosen = weights * chosen.sum(-1).to(weights.dtype), chosen.argmax(-1)
        up = torch.stack([linear.weight[None] for linear in ups])
        down = torch.stack(tuple(linear.weight for linear in downs))
        up_bias, down_bias = _biases(ups), _biases(downs)
        up_bias = None if up_bias is None else up_bias.unsqueeze(1)
        return call_as_cast(x, chosen, weights, up, down, up_bias, down_bias, *kinds)

    return forward


def _biases(linears: list[nn.Linear]) -> Tensor | None:
    """[E, out] of E projections; None where they have none."""
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    return torch.stack(biases) if len(biases) == len(linears) else None


def dropout_of_experts(module: nn.Module) -> bool:
    """Whether the experts of a layer that `_of_modules` takes have dropout: its random numbers
    depend on how many tokens each expert has."""
    drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    return module.training and drops and bool(_experts(module))


_LOOP = ["self", "hidden_states", "selected_experts", "routing_weights"]
"""The parameters of the forward of a `transformers` layer that loops over its experts."""


def _experts(module: nn.Module) -> list[nn.Module]:
    """The experts, by number, of a layer of `transformers` that loops over those that have tokens;
    none for other modules."""
    kind = type(module)
    is_librarys = isinstance(module, nn.ModuleDict) and kind.__module__.startswith("transformers.")
    if not is_librarys or list(inspect.signature(kind.forward).parameters) != _LOOP:
        return []
    experts: Any = module
    return [experts[f"expert_{k}"] for k in range(experts.num_experts)]


def _parts(expert: Any) -> tuple[nn.Linear, nn.Linear, str] | None:
    """The two projections of an expert, and the name of the activation between them."""
    linears = [part for part in expert.children() if isinstance(part, nn.Linear)]
    gate = _activation(expert.act)
    return (linears[0], linears[1], gate) if len(linears) == 2 and gate else None


_FAMILIES = (
    _with_identities,
    _of_modules,
    _in_rows,
    _sorting_router,
    _sorted_linear,
    _of_sorted_linears,
)


def _activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the activation that `function` is, identified by its outputs; None for any
    other."""
    line = torch.linspace(-FAR, FAR, 97, device="cpu")
    values = function(line)
    return next(
        (
            name
            for name, (known, _) in ACTIVATIONS.items()
            if torch.allclose(values, known(line), atol=1e-6)
        ),
        None,
    )
