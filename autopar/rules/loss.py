"""Losses: a rank scores the targets whose classes it has."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.rules.call import Call, letters, linear, place, rule, singles
from autopar.rules.notation import Dims, Rule
from autopar.rules.op import DimName, Family, Op, Shapes, reads_shape_of

_NONE, _MEAN = 0, 1


def _loss_dims(shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Dims of scores and of targets; the class dim, the second or only one, is `c`."""
    names = letters(len(shape) - 1)
    return singles((*names[:1], "c", *names[1:])), singles(names)


def nll_loss(call: Call) -> Rule | None:
    """aten.nll_loss_forward(scores, target, weight, reduction, ignore_index) -> (loss, count). The
    mean is no sum over ranks: each has its own count."""
    reduce = call.integer(3, "reduction", _MEAN)
    if reduce == _MEAN:
        return None
    scores, target = _loss_dims(call.shapes[0])
    inputs = place(call, {0: scores, 1: target, 2: singles("c")})
    return rule(inputs, [target if reduce == _NONE else (), ()], positional="c")


def nll_loss_backward(call: Call) -> Rule:
    """aten.nll_loss_backward(grad, scores, target, weight, reduction, ignore_index, count): right
    for the mean too, given the count of all ranks."""
    scores, target = _loss_dims(call.out)
    grad = target if call.integer(4, "reduction", _MEAN) == _NONE else ()
    inputs = place(call, {0: grad, 1: scores, 2: target, 3: singles("c"), 6: ()})
    return rule(inputs, [scores], positional="c", partial=linear(call, (call.arg(0),)))


def _score_of_targets(shapes: Shapes) -> dict[int, int]:
    """One score for each target."""
    return {0: prod(shapes.local_inputs[1])}


LOSS: Family = (
    (
        Op(nll_loss, reads=_score_of_targets, dim_names=(DimName(0, -1, "classes"),)),
        "nll_loss_forward",
    ),
    (Op(nll_loss, reads=_score_of_targets), "nll_loss2d_forward"),
    (Op(nll_loss_backward, reads=reads_shape_of(1)), "nll_loss_backward nll_loss2d_backward"),
)
