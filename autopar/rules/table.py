"""The rule of every op: what of it can be sharded, and what it does with partial inputs.

To add an op, write one line here and a sample of its arguments in `tests/rules/samples.py`; the
test there proves the rule by running it. Where the line depends on shapes or arguments, it names a
function of one of the files `rules_*.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.rules import experts, grouped, index, norm, ops, shape
from autopar.rules.algebra import ALGEBRA, SPECIAL
from autopar.rules.call import Call, RuleFunction, TensorShape, all_whole
from autopar.rules.images import IMAGES
from autopar.rules.notation import Dims, Rule, parse_rule

__all__ = ["RULES", "Call", "TensorShape", "rule_for"]

_POINTWISE = """
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

_LINEAR = {
    "0": """
        clone contiguous _to_copy div.Tensor div.Scalar elu_backward gelu_backward
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
"""Pointwise ops by the arguments in which they are jointly linear (`ops.pointwise`)."""

_FAMILIES: tuple[tuple[str | RuleFunction, str], ...] = (
    ("m k, k n -> m n", "mm"),
    ("b m k, b k n -> b m n", "bmm"),
    ("m k, k -> m", "mv"),
    ("k, k -> _", "dot"),
    (shape.identity_view, "alias detach lift_fresh"),
    (shape.transpose, "t transpose.int"),
    (shape.permute, "permute"),
    (
        shape.reshape,
        """_unsafe_view reshape squeeze squeeze.dim squeeze.dims unsqueeze view""",
    ),
    (shape.expand, "expand"),
    (shape.slice_, "slice.Tensor"),
    (shape.narrow, "narrow"),
    (shape.select, "select.int unbind.int"),
    (shape.split, "split.Tensor split_with_sizes unsafe_split.Tensor"),
    (shape.complex_pairs, "view_as_complex view_as_real"),
    (shape.slice_backward, "slice_backward"),
    (shape.slice_scatter, "slice_scatter"),
    (shape.select_backward, "select_backward"),
    (shape.select_scatter, "select_scatter"),
    (shape.cat, "cat"),
    (shape.stack, "stack"),
    (shape.pad, "constant_pad_nd"),
    (shape.repeat, "repeat"),
    (shape.rolled, "flip roll"),
    (shape.triangle, "tril triu"),
    (index.indexed, "index.Tensor _unsafe_index.Tensor"),
    (index.index_put, "index_put _unsafe_index_put"),
    (
        shape.new_tensor,
        """empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros
        zeros_like""",
    ),
    (
        all_whole,
        """arange arange.start arange.start_step empty.memory_format eye full linspace ones
        scalar_tensor zeros""",
    ),
    (
        # Every rank draws all of what one device draws.
        all_whole,
        """bernoulli bernoulli.Tensor bernoulli.p cauchy exponential geometric log_normal
        multinomial native_dropout normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor
        normal_functional poisson rand rand_like randint randint.low randint_like
        randint_like.low_dtype randn randn_like random random.from random.to randperm uniform""",
    ),
    (ops.reduction("sum"), "sum.dim_IntList"),
    (ops.reduction("sum", None), "sum"),
    (ops.reduction("mean"), "mean.dim"),
    (ops.reduction("mean", None), "mean"),
    (ops.reduction("count"), "count_nonzero.dim_IntList"),
    (ops.histogram, "histc"),
    (
        ops.reduction("whole"),
        """all.dim all.dims amax amin any.dim any.dims argmax argmin max.dim min.dim
        prod.dim_int std.correction var.correction var_mean.correction""",
    ),
    (ops.reduction("exchanged"), "logsumexp"),
    (ops.reduction("whole", None), "all any max min prod"),
    (ops.reduction("whole", 2), "linalg_vector_norm"),
    (ops.along(1, exchanged=True), "_log_softmax _softmax"),
    (ops.along(1), "_safe_softmax argsort cumprod"),
    (ops.along(1), "sort"),
    (ops.along(2), "sort.stable topk"),
    (ops.along(1, "0"), "cumsum"),
    (
        ops.along(2, "0", exchanged=True),
        "_log_softmax_backward_data _softmax_backward_data",
    ),
    (ops.norm, "_fused_rms_norm native_layer_norm"),
    (ops.norm_backward, "_fused_rms_norm_backward native_layer_norm_backward"),
    (norm.group_norm, "native_group_norm"),
    (norm.group_norm_backward, "native_group_norm_backward"),
    (norm.batch_norm, "_native_batch_norm_legit_no_training"),
    (norm.batch_norm_backward, "native_batch_norm_backward"),
    (index.embedding, "embedding"),
    (index.embedding_backward, "embedding_dense_backward"),
    (index.embedding_bag, "_embedding_bag _embedding_bag_forward_only"),
    (index.embedding_bag_backward, "_embedding_bag_backward"),
    (ops.nll_loss, "nll_loss_forward nll_loss2d_forward"),
    (ops.nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    (index.gather, "gather"),
    (index.scatter, "scatter.src scatter.value scatter_add"),
    (index.index_select, "index_select"),
    (index.index_add, "index_add"),
    *IMAGES,
    *ALGEBRA,
)


def _addmm(call: Call) -> Rule | None:
    """The summed dim is whole: each of its parts would add the bias once more."""
    names = ("b", "m", "n")[-len(call.out) :]
    added = ops.aligned(call.shape(call.arg(0)), call.out, names)
    product = "b m k!, b k! n -> b m n" if len(names) == 3 else "m k!, k! n -> m n"
    parsed = parse_rule(product)
    return replace(parsed, inputs=(added, *parsed.inputs))


def _view_dtype(call: Call) -> Rule | None:
    """Bits read as another type of the same width: no sum survives it."""
    return ops.pointwise()(call) if call.shapes[0] == call.out else None


def _table() -> dict[str, str | RuleFunction]:
    found: dict[str, str | RuleFunction] = {"getitem": shape.identity_view}
    families = (
        (ops.pointwise(), _POINTWISE + SPECIAL),
        *((ops.pointwise(joint), names) for joint, names in _LINEAR.items()),
        *_FAMILIES,
        (_addmm, "addmm baddbmm"),
        (_view_dtype, "view.dtype"),
    )
    for rule, names in families:
        for name in names.split():
            found[f"aten.{name}" if "." in name else f"aten.{name}.default"] = rule
    for name in ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"):
        found[name] = grouped.grouped_matmul
    found["transformers.grouped_mm_fallback_backward.default"] = grouped.grouped_matmul_backward
    found["autopar.sdpa.default"] = ops.attention
    found["autopar.sdpa_backward.default"] = ops.attention_backward
    found["autopar.recurrent.default"] = ops.recurrent
    found["autopar.recurrent_backward.default"] = ops.recurrent
    found["autopar.experts.default"] = experts.experts
    found["autopar.experts_backward.default"] = experts.experts_backward
    return found


RULES: dict[str, str | RuleFunction] = _table()
"""Op name, as in `graph.Node.op`, to its line of notation or to the function that writes it."""


def rule_for(call: Call) -> Rule | None:
    """The rule of a call; None if nobody has described the op, or not for such arguments. It fits
    the call: ranks and sizes agree, dims of size 1 have no letters, and `sizes` has the letters of
    groups."""
    entry = RULES.get(call.op)
    if entry is None:
        return None
    found = parse_rule(entry) if isinstance(entry, str) else entry(call)
    return None if found is None else _fitted(found, call)


def _fitted(rule: Rule, call: Call) -> Rule | None:
    sizes = _sizes(rule, call)
    if sizes is None:
        return None

    def kept(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(a for a in dim if sizes[a] != 1) for dim in dims) for dims in tensors
        )

    fitted = replace(rule, inputs=kept(rule.inputs), outputs=kept(rule.outputs))
    grouped = {
        a for dims in (*fitted.inputs, *fitted.outputs) for dim in dims if len(dim) > 1 for a in dim
    }
    empty = {a for a in fitted.letters if sizes[a] == 0}
    return replace(
        fitted,
        whole=(rule.whole | empty) & frozenset(fitted.letters),
        exchanged=rule.exchanged & frozenset(fitted.letters),
        joint=tuple(j for j in rule.joint if set(j[1]) <= set(fitted.letters)),
        sizes=tuple((a, sizes[a]) for a in sorted(grouped)),
    )


def _sizes(rule: Rule, call: Call) -> dict[str, int] | None:
    """The size of every letter; None if the rule does not fit the call."""
    tensors = (*rule.inputs, *rule.outputs)
    shapes = [t.shape for t in (*call.inputs, *call.outputs)]
    counts = (len(rule.inputs), len(rule.outputs))
    if counts != (len(call.inputs), len(call.outputs)):
        return None
    if any(len(dims) != len(shape) for dims, shape in zip(tensors, shapes, strict=True)):
        return None
    pairs = [
        pair
        for dims, shape in zip(tensors, shapes, strict=True)
        for pair in zip(dims, shape, strict=True)
    ]
    sizes = dict(rule.sizes)
    for dim, size in pairs:
        if len(dim) == 1:
            sizes.setdefault(dim[0], size)
    fits = all(
        all(a in sizes for a in dim) and prod(sizes[a] for a in dim) == size for dim, size in pairs
    )
    return sizes if fits else None
