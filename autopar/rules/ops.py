"""Rules of families of ops: pointwise, reductions, norms, losses, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from autopar.ir.attention import QUERIES, RING
from autopar.ir.graph import Arg, Ref
from autopar.rules.call import (
    Call,
    RuleFunction,
    aligned,
    dim_of,
    letters,
    linear,
    place,
    rule,
    singles,
)
from autopar.rules.notation import Dim, Dims, Rule

_NONE, _MEAN = 0, 1


def pointwise(joint: str = "") -> RuleFunction:
    """Every dim parallel, with broadcasting. `joint` lists the sets of arguments, by position, in
    which the op is jointly linear: "01" is add, "0 1" is mul."""
    sets = [[int(position) for position in members] for members in joint.split()]

    def function(call: Call) -> Rule:
        names = letters(len(call.out))
        inputs = [aligned(shape, call.out, names) for shape in call.shapes]
        partial = linear(call, *([call.arg(p) for p in members] for members in sets))
        return rule(inputs, [singles(names)] * len(call.outputs), partial=partial)

    return function


def reduction(how: str, at: int | None = 1) -> RuleFunction:
    """The dims of argument `at` (all if None) are reduced: by "sum", by "count" (a sum that is not
    linear), by "mean", "whole", or "exchanged" (the op itself reduces over ranks)."""

    def function(call: Call) -> Rule:
        rank = len(call.shapes[0])
        named = None if at is None else call.integers(at, "dim")
        gone = {dim_of(d, rank) for d in named} if named else set(range(rank))
        names = singles(letters(rank))
        keep = len(call.out) == rank
        result: list[Dim] = [
            () if d in gone else name for d, name in enumerate(names) if keep or d not in gone
        ]
        return rule(
            [names],
            [result] * len(call.outputs),
            whole=[names[d][0] for d in gone if rank] if how == "whole" else (),
            exchanged=[names[d][0] for d in gone if rank] if how == "exchanged" else (),
            complete=how == "exchanged",
            partial=linear(call, (Ref(0),)) if how in ("sum", "mean") else (),
            mean=how == "mean",
        )

    return function


def histogram(call: Call) -> Rule:
    """aten.histc(x, bins, min, max): counts add up, where the bins do not depend on the data."""
    fixed = call.arg(2, "min", 0) != call.arg(3, "max", 0)
    names = letters(len(call.shapes[0]))
    return rule([singles(names)], [(("bin",),)], whole=("bin", *(() if fixed else names)))


def along(at: int, joint: str = "", default: int = -1, *, exchanged: bool = False) -> RuleFunction:
    """The dim of argument `at` is whole or `exchanged`, the others parallel; all tensors have equal
    ranks. An output of another extent in that dim has a letter of its own."""

    def function(call: Call) -> Rule:
        shape = call.shapes[0]
        dim = dim_of(call.integer(at, "dim", default), len(shape))
        names = letters(len(shape))
        whole = set(names[dim : dim + 1])
        outputs: list[Dims] = []
        for index, output in enumerate(call.outputs):
            there = list(names)
            if output.shape != shape:
                there[dim] = f"o{index}"
                whole.add(there[dim])
            outputs.append(singles(there))
        sets = [[call.arg(int(p)) for p in members] for members in joint.split()]
        inputs = [singles(names)] * len(call.inputs)
        partial = linear(call, *sets)
        if exchanged:
            return rule(inputs, outputs, exchanged=whole, complete=True, partial=partial)
        return rule(inputs, outputs, whole=whole, partial=partial)

    return function


def norm(call: Call) -> Rule:
    """aten.native_layer_norm(x, shape, weight, bias, eps) -> (y, mean, rstd), and
    aten._fused_rms_norm(x, shape, weight, eps) -> (y, rstd): ranks that share the normalised dims
    exchange sums."""
    rest, whole = _norm_letters(call, 0)
    pairs: list[tuple[Arg, Sequence[Dim]]] = [(call.arg(0), singles((*rest, *whole)))]
    pairs += [(call.arg(k), singles(whole)) for k in (2, 3)]
    outputs: list[Dims] = [singles((*rest, *whole))]
    outputs += [_statistics(rest, whole)] * (len(call.outputs) - 1)
    return rule(place(call, *pairs), outputs, exchanged=whole, complete=True)


def norm_backward(call: Call) -> Rule:
    """aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask) and
    aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, mask): the gradients of weight and
    bias are summed over all other dims."""
    rest, whole = _norm_letters(call, 1)
    full, statistics = singles((*rest, *whole)), _statistics(rest, whole)
    num_statistics = 1 if "rms" in call.op else 2
    pairs: list[tuple[Arg, Sequence[Dim]]] = [(call.arg(0), full), (call.arg(1), full)]
    pairs += [(call.arg(3 + k), statistics) for k in range(num_statistics)]
    pairs += [(call.arg(3 + num_statistics + k), singles(whole)) for k in range(num_statistics)]
    outputs = [full, singles(whole), singles(whole)][: 1 + num_statistics]
    mask = cast("tuple[bool, ...]", call.arg(3 + 2 * num_statistics, "output_mask"))
    return rule(
        place(call, *pairs),
        wanted(call, outputs, mask),
        whole=unwanted_letters(call, mask),
        exchanged=whole,
        complete=True,
        partial=linear(call, (call.arg(0),)),
    )


def _norm_letters(call: Call, at: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rank = len(call.shape(call.arg(at)))
    normalised = len(call.integers(at + 1, "normalized_shape") or ())
    names = letters(rank)
    return names[: rank - normalised], names[rank - normalised :]


def _statistics(rest: Sequence[str], whole: Sequence[str]) -> Dims:
    return (*singles(rest), *(((),) * len(whole)))


def wanted(call: Call, outputs: Sequence[Dims], mask: Sequence[bool]) -> list[Dims]:
    """`outputs` by an output mask: an unwanted one is whole, whatever shape stands for it, or is
    not listed at all."""
    if len(call.outputs) < len(outputs):
        return [dims for dims, want in zip(outputs, mask, strict=True) if want]
    return [
        dims if want else singles(letters(len(output.shape), f"x{k}_"))
        for k, (dims, output, want) in enumerate(zip(outputs, call.outputs, mask, strict=True))
    ]


def unwanted_letters(call: Call, mask: Sequence[bool]) -> list[str]:
    """The letters that `wanted` gives to outputs that are not wanted."""
    if len(call.outputs) < len(mask):
        return []
    pairs = enumerate(zip(call.outputs, mask, strict=True))
    return [a for k, (o, want) in pairs if not want for a in letters(len(o.shape), f"x{k}_")]


def _loss_dims(shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Dims of scores and of targets; the class dim, the second or only one, is `c`."""
    names = letters(len(shape) - 1)
    scores = (*names[:1], "c", *names[1:])
    return singles(scores), singles(names)


def nll_loss(call: Call) -> Rule | None:
    """aten.nll_loss_forward(scores, target, weight, reduction, ignore_index) -> (loss, count). The
    mean is no sum over ranks: each has its own count."""
    reduce = call.integer(3, "reduction", _MEAN)
    if reduce == _MEAN:
        return None
    scores, target = _loss_dims(call.shapes[0])
    inputs = place(call, (call.arg(0), scores), (call.arg(1), target), (call.arg(2), singles("c")))
    return rule(inputs, [target if reduce == _NONE else (), ()], exchanged="c")


def nll_loss_backward(call: Call) -> Rule:
    """aten.nll_loss_backward(grad, scores, target, weight, reduction, ignore_index, count): right
    for the mean too, given the count of all ranks."""
    scores, target = _loss_dims(call.out)
    grad = target if call.integer(4, "reduction", _MEAN) == _NONE else ()
    inputs = place(
        call,
        (call.arg(0), grad),
        (call.arg(1), scores),
        (call.arg(2), target),
        (call.arg(3), singles("c")),
        (call.arg(6), ()),
    )
    return rule(inputs, [scores], exchanged="c", partial=linear(call, (call.arg(0),)))


def recurrent(call: Call) -> Rule:
    """autopar.recurrent and its backward: sequences [T, b, .] and states [D, b, .] of independent
    rows; a step needs all that the step before it made. Gradients of weights are summed over b."""

    def dims(shape: Sequence[int], prefix: str) -> Dims:
        names = list(letters(len(shape), prefix))
        names[1:2] = "b" if len(shape) == _SEQUENCE else names[1:2]
        return singles(names)

    inputs = [dims(x.shape, f"i{k}_") for k, x in enumerate(call.inputs)]
    outputs = [dims(x.shape, f"o{k}_") for k, x in enumerate(call.outputs)]
    named = {a for tensor in (*inputs, *outputs) for dim in tensor for a in dim}
    return rule(inputs, outputs, whole=named - {"b"})


_SEQUENCE = 3
"""Dims of what has rows, unlike a weight."""


def attention(call: Call) -> Rule:
    """autopar.sdpa(q, k, v, mask, is_causal, scale) -> (out, lse). Query rows are parallel; under a
    causal mask the op must know which ones it has. Grouped heads share a key-value head: q has
    (kv g), k and v have kv. Without a mask tensor keys and values may go round a ring."""
    q, k, v, out, lse, sizes, whole = _attention_dims(call, 0)
    mask = _mask_dims(call, call.arg(3), q, k)
    inputs = place(call, *zip(call.args, (q, k, v, mask), strict=False))
    causal = bool(call.arg(4))
    exchanged, joint = _sequence(call, call.arg(3), q=0, causal=causal)
    return rule(inputs, [out, lse], whole=whole, sizes=sizes, exchanged=exchanged, joint=joint)


def attention_backward(call: Call) -> Rule:
    """autopar.sdpa_backward(grad, q, k, v, out, lse, mask, is_causal, scale) -> (dq, dk, dv)."""
    q, k, v, out, lse, sizes, whole = _attention_dims(call, 1)
    mask = _mask_dims(call, call.arg(6), q, k)
    inputs = place(call, *zip(call.args, (out, q, k, v, out, lse, mask), strict=False))
    exchanged, joint = _sequence(call, call.arg(6), q=1, causal=bool(call.arg(7)))
    return rule(
        inputs,
        [q, k, v],
        whole=whole,
        sizes=sizes,
        exchanged=exchanged,
        joint=joint,
        partial=linear(call, (call.arg(0),)),
    )


def _sequence(
    call: Call, mask: Arg, *, q: int, causal: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """(exchanged letters, joint factors) of attention whose queries are input `q`. A causal ring
    has as many keys as queries: each block of keys is then before, at or after that of queries."""
    square = call.shapes[q][2] == call.shapes[q + 1][2]
    ring = not isinstance(mask, Ref) and (square or not causal)
    return (QUERIES,) if causal else (), ((RING, (QUERIES, "t")),) if ring else ()


def _attention_dims(
    call: Call, at: int
) -> tuple[Dims, Dims, Dims, Dims, Dims, dict[str, int], set[str]]:
    heads, groups = call.shapes[at][1], call.shapes[at + 1][1]
    head: Dim = ("h",) if heads == groups else ("kv", "g")
    shared: Dim = head[:1]
    sizes = {} if heads == groups else {"kv": groups, "g": heads // groups}
    whole = {"t", "d", "e"}
    return (
        (("b",), head, ("s",), ("d",)),
        (("b",), shared, ("t",), ("d",)),
        (("b",), shared, ("t",), ("e",)),
        (("b",), head, ("s",), ("e",)),
        (("b",), head, ("s",)),
        sizes,
        whole,
    )


def _mask_dims(call: Call, mask: Arg, q: Dims, k: Dims) -> Dims:
    """A mask is [batch or 1, heads or 1, queries or 1, keys], or lacks leading dims."""
    full = (q[0], q[1], q[2], k[2])
    shape = call.shape(mask)
    return tuple(
        () if size == 1 else dim for size, dim in zip(shape, full[4 - len(shape) :], strict=True)
    )
