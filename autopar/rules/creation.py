"""Ops that read no elements of a tensor: they make constants and random numbers."""

from __future__ import annotations

from autopar.ir.graph import Ref
from autopar.rules.notation import Call, Rule, all_whole, letters, linear, rule, singles
from autopar.rules.op import Changes, Family, LocalCall, Op, output_shape, reads_shape_of


def new_tensor(call: Call) -> Rule:
    """Constant factories that take a tensor for its dtype. Where the shapes are equal, the result
    has the tensor's letters; otherwise the tensor must be whole."""
    shape, out = call.shapes[0], call.out
    names = letters(len(out))
    fill = call.arg(2 if "new_full" in call.op else 1, "fill_value", None)
    zero = "zeros" in call.op or "empty" in call.op or ("full" in call.op and fill == 0)
    partial = linear(call, (Ref(0),)) if zero else ()
    if shape == out:
        return rule([singles(names)], [singles(names)], partial=partial)
    others = letters(len(shape), "i")
    return rule([singles(others)], [singles(names)], whole=others, partial=partial)


def _local_strided(call: LocalCall) -> Changes:
    """The local size and strides: dims in the same order in memory, without gaps."""
    shape = call.shapes.local_outputs[0]
    global_strides = call.arg(2, "stride")
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (global_strides[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return {(1, "size"): list(shape), (2, "stride"): strides}


CREATION: Family = (
    (Op(new_tensor, reads=reads_shape_of(0)), "empty_like full_like zeros_like"),
    (
        Op(new_tensor, reads=reads_shape_of(0), local_args=output_shape(1, "size")),
        "new_empty new_full new_ones new_zeros",
    ),
    (Op(new_tensor, reads=reads_shape_of(0), local_args=_local_strided), "new_empty_strided"),
    (
        Op(all_whole),
        """arange arange.start arange.start_step empty.memory_format eye full linspace ones
        scalar_tensor zeros""",
    ),
    # Every rank draws all that a single device draws.
    (
        Op(all_whole),
        """bernoulli bernoulli.Tensor multinomial native_dropout normal.Tensor_Tensor
        normal.Tensor_float normal.float_Tensor poisson rand randint randint.low randn randperm""",
    ),
    (
        Op(all_whole, fills=True, reads=reads_shape_of(0)),
        """bernoulli.p cauchy exponential geometric log_normal normal_functional rand_like
        randint_like randint_like.low_dtype randn_like random random.from random.to uniform""",
    ),
)
