"""What a layer of experts (`runtime/ops/experts.py`) can shard: its tokens, its experts, the width
of its experts; and tokens and experts at once on one axis."""

from __future__ import annotations

from autopar.rules.call import Call, place, rule, singles
from autopar.rules.notation import Dims, Rule

_WHOLE = ("d", "k", "g")
_JOINT = (("exchange", ("n", "e")),)
_TOKENS, _CHOICES = singles("nd"), singles("nk")
_WEIGHTS: tuple[Dims, ...] = (singles("egid"), singles("edi"), singles("egi"))
"""Of up, down and up_bias."""


def experts(call: Call) -> Rule:
    """autopar.experts(x, chosen, weights, up, down, up_bias, gate, may_skip) -> y. A rank that has
    some of the experts, or a part of each, makes a summand of y."""
    inputs = (_TOKENS, _CHOICES, _CHOICES, *_WEIGHTS)
    return rule(
        place(call, *zip(call.args, inputs, strict=False)),
        (_TOKENS,),
        whole=_WHOLE,
        exchanged=("e",),
        joint=_JOINT,
    )


def experts_backward(call: Call) -> Rule:
    """autopar.experts_backward(grad, x, chosen, weights, up, down, up_bias, gate, may_skip) ->
    gradients of x, weights, up, down and up_bias; the last is empty where there is none."""
    inputs = (_TOKENS, _TOKENS, _CHOICES, _CHOICES, *_WEIGHTS)
    bias = _WEIGHTS[2] if len(call.outputs[4].shape) == 3 else singles("z")
    return rule(
        place(call, *zip(call.args, inputs, strict=False)),
        (_TOKENS, _CHOICES, *_WEIGHTS[:2], bias),
        whole=_WHOLE,
        exchanged=("e",),
        joint=_JOINT,
    )
