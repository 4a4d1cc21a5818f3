"""Norms: over the last dims, over a batch, over groups of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.rules.notation import (
    Call,
    Dims,
    Rule,
    backward,
    letters,
    place,
    rule,
    singles,
)
from autopar.rules.op import Changes, Family, LocalCall, Op

_CHANNEL: Dims = (("c",),)
_OF_GROUPS = singles("ng")


def norm(call: Call) -> Rule:
    """aten.native_layer_norm(x, shape, weight, bias, eps) -> (y, mean, rstd), and
    aten._fused_rms_norm(x, shape, weight, eps) -> (y, rstd): ranks that share the normalised dims
    exchange sums."""
    rest, whole = _norm_letters(call, 0)
    full, statistics = singles((*rest, *whole)), _statistics(rest, whole)
    inputs = place(call, {0: full, 2: singles(whole), 3: singles(whole)})
    return rule(inputs, [full, *[statistics] * (len(call.outputs) - 1)], permuted=whole)


def norm_backward(call: Call) -> Rule:
    """aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask) and
    aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, mask): the gradients of weight and
    bias are summed over all other dims."""
    rest, whole = _norm_letters(call, 1)
    full, statistics = singles((*rest, *whole)), _statistics(rest, whole)
    num_weights = 1 if "rms" in call.op else 2
    weights = [singles(whole)] * num_weights
    inputs = {0: full, 1: full, **dict(enumerate((*[statistics] * num_weights, *weights), 3))}
    return backward(call, inputs, [full, *weights], 3 + 2 * num_weights, permuted=whole)


def _norm_letters(call: Call, at: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rank = len(call.shape(call.arg(at)))
    normalised = len(call.integers(at + 1, "normalized_shape") or ())
    names = letters(rank)
    return names[: rank - normalised], names[rank - normalised :]


def _statistics(rest: Sequence[str], whole: Sequence[str]) -> Dims:
    return (*singles(rest), *(((),) * len(whole)))


def _full(shape: tuple[int, ...]) -> Dims:
    return singles(("n", "c", *letters(len(shape) - 2)))


def batch_norm(call: Call) -> Rule:
    """aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, ...): every dim is
    parallel; the statistics that training would save are empty. In training, the tracer splits
    batch norm (`tracer/decomposed.py`)."""
    full = _full(call.out)
    empty = [letters(len(o.shape), f"x{k}_") for k, o in enumerate(call.outputs[1:])]
    return rule(
        place(call, {0: full, **dict.fromkeys((1, 2, 3, 4), _CHANNEL)}),
        [full, *map(singles, empty)],
        whole=[a for names in empty for a in names],
    )


def batch_norm_backward(call: Call) -> Rule | None:
    """aten.native_batch_norm_backward(grad, x, weight, mean, var, saved mean, saved 1/std, train,
    eps, mask), in inference: gradients of weight and bias are sums over the rest."""
    if call.arg(7, "train"):
        return None
    full = _full(call.shapes[0])
    inputs: dict[int, Dims] = {0: full, 1: full, **dict.fromkeys((2, 3, 4, 5, 6), _CHANNEL)}
    empty = {k: f"e{k}" for k in (5, 6) if call.shape(call.arg(k)) != call.shapes[0][1:2]}
    inputs |= {k: ((name,),) for k, name in empty.items()}
    return backward(call, inputs, [full, _CHANNEL, _CHANNEL], 9, whole=empty.values())


def _groups(
    shape: tuple[int, ...], groups: int
) -> tuple[Dims, Dims, tuple[str, ...], dict[str, int]]:
    """(dims of x, dims of what there is per channel, whole letters, sizes): the channels are
    `(g k!)`."""
    space, sizes = letters(len(shape) - 2), {"g": groups, "k": shape[1] // groups}
    return (("n",), ("g", "k"), *singles(space)), (("g", "k"),), ("k", *space), sizes


def group_norm(call: Call) -> Rule:
    """aten.native_group_norm(x, weight, bias, N, C, HxW, group, eps) -> (y, mean, rstd)."""
    full, channel, whole, sizes = _groups(call.out, call.integer(6, "group"))
    inputs = place(call, {0: full, 1: channel, 2: channel})
    return rule(inputs, [full, _OF_GROUPS, _OF_GROUPS], whole=whole, sizes=sizes)


def group_norm_backward(call: Call) -> Rule:
    """aten.native_group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, mask)."""
    full, channel, whole, sizes = _groups(call.shapes[1], call.integer(8, "group"))
    inputs = {0: full, 1: full, 2: _OF_GROUPS, 3: _OF_GROUPS, 4: channel}
    return backward(call, inputs, [full, channel, channel], 9, whole=whole, sizes=sizes)


def _local_groups(at: int, x: int, statistics: int | None) -> Callable[[LocalCall], Changes]:
    """N, C and, behind HxW, the number of groups, which the statistics have one column each of:
    outputs in forward, input `statistics` in backward."""

    def changes(call: LocalCall) -> Changes:
        shapes = call.shapes
        batch, channels = shapes.local_inputs[x][:2]
        columns = shapes.local_outputs[1] if statistics is None else shapes.local_inputs[statistics]
        return {(at, "N"): batch, (at + 1, "C"): channels, (at + 3, "group"): columns[1]}

    return changes


NORM: Family = (
    (Op(norm, row_reductions=("sum", "sum"), row_copies=(1.0, 1.5)), "native_layer_norm"),
    (
        Op(norm_backward, row_reductions=("sum", "sum"), row_copies=(3.0, 4.5)),
        "native_layer_norm_backward",
    ),
    (Op(norm, row_reductions=("sum",), row_copies=(1.0, 1.5)), "_fused_rms_norm"),
    (
        Op(norm_backward, row_reductions=("sum",), row_copies=(3.0, 4.5)),
        "_fused_rms_norm_backward",
    ),
    (Op(batch_norm), "_native_batch_norm_legit_no_training"),
    (Op(batch_norm_backward, one_layout=True), "native_batch_norm_backward"),
    (
        Op(group_norm, local_args=_local_groups(3, 0, None), one_layout=True),
        "native_group_norm",
    ),
    (
        Op(group_norm_backward, local_args=_local_groups(5, 1, 2), one_layout=True),
        "native_group_norm_backward",
    ),
)
