"""Ops that compute each element of their outputs from the same element of their inputs."""

from __future__ import annotations

from autopar.rules.notation import (
    Call,
    Rule,
    RuleFunction,
    aligned,
    letters,
    linear_in,
    rule,
    singles,
)
from autopar.rules.op import Family, Op

_ALONE = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and.Scalar bitwise_and.Tensor bitwise_not
bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Tensor ceil celu clamp clamp.Tensor clamp_max
clamp_min cos cosh div.Tensor_mode div.Scalar_mode elu eq.Scalar eq.Tensor erf erfc exp exp2 expm1
floor floor_divide floor_divide.Scalar fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gelu gt.Scalar
gt.Tensor hardsigmoid hardswish hardtanh isfinite isinf isnan le.Scalar le.Tensor leaky_relu log
log10 log1p log2 log_sigmoid_forward logical_and logical_not logical_or logical_xor lt.Scalar
lt.Tensor maximum minimum mish ne.Scalar ne.Tensor ones_like pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor reciprocal relu relu6 remainder.Scalar remainder.Tensor round rsqrt selu sgn
sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc where.Scalar
"""

_SPECIAL = """
angle bitwise_left_shift.Tensor bitwise_right_shift.Tensor copysign.Tensor digamma erfinv fmax fmin
gcd hypot i0 igamma igammac lcm ldexp.Tensor lgamma nextafter signbit special_airy_ai
special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
special_legendre_polynomial_p special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0 special_zeta frexp.Tensor round.decimals polygamma complex polar
"""
"""The functions that mathematics calls special, and their like."""

_LINEAR = {
    "0": """
        clone contiguous _conj_physical _to_copy div.Tensor div.Scalar elu_backward gelu_backward
        hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
        lift_fresh_copy log_sigmoid_backward mul.Scalar native_dropout_backward neg
        sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward
    """,
    "0 1": "mul.Tensor",
    "01": """
        add.Scalar add.Tensor addcdiv fill.Scalar lerp.Scalar lerp.Tensor rsub.Scalar
        rsub.Tensor sub.Scalar sub.Tensor
    """,
    "01 02": "addcmul",
    "02": "masked_fill.Scalar masked_fill.Tensor",
    "1": "copy fill.Tensor",
    "12": "where.ScalarOther where.ScalarSelf where.self",
}
"""Pointwise ops by the arguments in which they are jointly linear (`pointwise`)."""


def pointwise(joint: str = "") -> RuleFunction:
    """Every dim parallel, with broadcasting. `joint` lists the sets of arguments, by position, in
    which the op is jointly linear: "01" is add, "0 1" is mul."""

    def function(call: Call) -> Rule:
        names = letters(len(call.out))
        return rule(
            [aligned(shape, call.out, names) for shape in call.shapes],
            [singles(names)] * len(call.outputs),
            partial=linear_in(call, joint),
        )

    return function


def _view_dtype(call: Call) -> Rule | None:
    """Bits read as another type of the same width: no sum survives it."""
    return pointwise()(call) if call.shapes[0] == call.out else None


POINTWISE: Family = (
    (Op(pointwise()), _ALONE + _SPECIAL),
    *((Op(pointwise(joint)), names) for joint, names in _LINEAR.items()),
    (Op(_view_dtype), "view.dtype"),
)
