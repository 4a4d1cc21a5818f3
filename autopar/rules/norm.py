"""Rules of norms over a batch or over groups of channels."""

from __future__ import annotations

from typing import cast

from autopar.ir.graph import Arg
from autopar.rules.call import Call, letters, linear, place, rule, singles
from autopar.rules.notation import Dims, Rule
from autopar.rules.ops import unwanted_letters, wanted

_CHANNEL: Dims = (("c",),)


def _full(shape: tuple[int, ...]) -> Dims:
    return singles(("n", "c", *letters(len(shape) - 2)))


def batch_norm(call: Call) -> Rule:
    """aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, ...): every dim is
    parallel; the statistics that training would save are empty. In training, the tracer splits
    batch norm (`tracer/pieces_norm.py`)."""
    full = _full(call.out)
    empty = [letters(len(o.shape), f"x{k}_") for k, o in enumerate(call.outputs[1:])]
    pairs: list[tuple[Arg, Dims]] = [(call.arg(0), full)]
    pairs += [(call.arg(k), _CHANNEL) for k in (1, 2, 3, 4)]
    whole = [a for names in empty for a in names]
    return rule(place(call, *pairs), [full, *map(singles, empty)], whole=whole)


def batch_norm_backward(call: Call) -> Rule | None:
    """aten.native_batch_norm_backward(grad, x, weight, mean, var, saved mean, saved 1/std, train,
    eps, mask), in inference: gradients of weight and bias are sums over the rest."""
    if call.arg(7, "train"):
        return None
    full = _full(call.shapes[0])
    mask = cast("tuple[bool, ...]", call.arg(9, "output_mask"))
    pairs: list[tuple[Arg, Dims]] = [(call.arg(0), full), (call.arg(1), full)]
    pairs += [(call.arg(k), _CHANNEL) for k in (2, 3, 4)]
    extra: list[str] = []
    for k in (5, 6):
        empty = call.shape(call.arg(k)) != call.shapes[0][1:2]
        pairs.append((call.arg(k), ((f"e{k}",),) if empty else _CHANNEL))
        extra += [f"e{k}"] if empty else []
    return rule(
        place(call, *pairs),
        wanted(call, [full, _CHANNEL, _CHANNEL], mask),
        whole=[*extra, *unwanted_letters(call, mask)],
        partial=linear(call, (call.arg(0),)),
    )


def _groups(call: Call, shape: tuple[int, ...], groups: int) -> tuple[Dims, Dims, dict[str, int]]:
    """(dims of x, dims of what there is per channel, sizes): the channels are `(g k!)`."""
    space = singles(letters(len(shape) - 2))
    sizes = {"g": groups, "k": shape[1] // groups}
    return (("n",), ("g", "k"), *space), (("g", "k"),), sizes


def group_norm(call: Call) -> Rule:
    """aten.native_group_norm(x, weight, bias, N, C, HxW, group, eps) -> (y, mean, rstd)."""
    full, channel, sizes = _groups(call, call.out, call.integer(6, "group"))
    pairs = ((call.arg(0), full), (call.arg(1), channel), (call.arg(2), channel))
    statistics = singles("ng")
    whole = {a for dim in full for a in dim} - {"n", "g"}
    return rule(place(call, *pairs), [full, statistics, statistics], whole=whole, sizes=sizes)


def group_norm_backward(call: Call) -> Rule:
    """aten.native_group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, mask)."""
    full, channel, sizes = _groups(call, call.shapes[1], call.integer(8, "group"))
    statistics = singles("ng")
    dims = (full, full, statistics, statistics, channel)
    mask = cast("tuple[bool, ...]", call.arg(9, "output_mask"))
    return rule(
        place(call, *((call.arg(k), d) for k, d in enumerate(dims))),
        wanted(call, [full, channel, channel], mask),
        whole={a for dim in full for a in dim} - {"n", "g"} | set(unwanted_letters(call, mask)),
        partial=linear(call, (call.arg(0),)),
        sizes=sizes,
    )
