"""Arguments to prove every rule with: at least one sample per op of the table, here or in the
other files of samples."""

from __future__ import annotations

import torch

from tests.rules import (  # noqa: F401 - more samples
    samples_algebra,
    samples_chunked_loss,
    samples_experts,
    samples_images,
    samples_recurrent,
)
from tests.rules.making import B, C, F, I, S, U
from tests.rules.sampling import SAMPLES, sample

__all__ = ["SAMPLES"]

# matrices
sample("mm", F(4, 6), F(6, 9))
sample("mm", F(5, 1), F(1, 2))
sample("addmm", F(9), F(4, 6), F(6, 9))
sample("addmm", F(4, 1), F(4, 6), F(6, 9), beta=0.5, alpha=2.0)
sample("bmm", F(2, 4, 6), F(2, 6, 3))
sample("baddbmm", F(2, 4, 3), F(2, 4, 6), F(2, 6, 3), beta=2)
sample("baddbmm", F(4, 1), F(2, 4, 6), F(2, 6, 3))
_BILINEAR = ((1, 3), (0,), (1, 2), (2, 3))
sample("_trilinear", F(6, 4), F(9, 4, 8), F(6, 8), *_BILINEAR)
sample("_trilinear", F(6, 9), F(6, 4), F(6, 8), (2, 3), (1, 3), (1, 2), (0,))
sample("mv", F(4, 6), F(6))
sample("dot", F(6), F(6))

# pointwise
_ANY = """abs asinh atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu
hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log_sigmoid_forward logical_not mish
neg ones_like relu relu6 round selu sgn sigmoid sign silu sin sinh softplus square tan tanh trunc
clone contiguous lift_fresh_copy _to_copy"""
_UNIT = "acos asin atanh log log10 log1p log2 reciprocal rsqrt sqrt"
sample(_ANY, F(4, 3))
sample("neg clone gelu", F(2, 1, 6))
sample("neg tanh", F())
sample(_UNIT, U(4, 3))
sample("acosh", F(4, 3))
sample("bitwise_not logical_not", B(4, 3))
sample("gelu", F(4, 3), approximate="tanh")
sample("_to_copy", F(4, 6), dtype=torch.int64)
sample("_to_copy", F(4, 6), dtype=torch.bool)
sample("_to_copy", I(4, 6, high=3), dtype=torch.float64)
_BINARY = "atan2 eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor ne.Tensor maximum minimum"
_BINARY += " add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor"
sample(_BINARY, F(4, 3), F(4, 3))
sample(_BINARY, F(2, 4, 3), F(3))
sample(_BINARY, F(4, 1, 3), F(2, 1))
sample(_BINARY, F(4, 6), F())
sample("add.Tensor sub.Tensor rsub.Tensor", F(4, 6), F(4, 6), alpha=3)
sample("add.Tensor sub.Tensor mul.Tensor div.Tensor", F(4, 6), 2.0)
sample("add.Tensor sub.Tensor", F(4, 6), 0)
sample("add.Tensor mul.Tensor", I(4, 6, high=9), I(6, high=9))
sample("mul.Tensor", F(4, 6), B(4, 6))
_SCALAR = "eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar ne.Scalar fmod.Scalar remainder.Scalar"
_SCALAR += " add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar floor_divide"
sample(_SCALAR.replace("floor_divide", "floor_divide.Scalar"), F(4, 6), 2)
sample("add.Scalar mul.Scalar", F(4, 6), 0)
sample("pow.Scalar", 2.0, F(4, 6))
sample("pow.Tensor_Tensor", U(4, 6), F(6))
sample("fmod.Tensor remainder.Tensor floor_divide", F(4, 6), U(4, 1))
sample("div.Tensor_mode", F(4, 6), U(6), rounding_mode="floor")
sample("div.Scalar_mode", F(4, 6), 0.7, rounding_mode="trunc")
sample("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", B(4, 6), B(2, 1, 6))
sample("logical_and logical_or logical_xor", B(4, 6), B(4, 1))
sample("bitwise_and.Scalar bitwise_or.Scalar", I(4, 6, high=9), 3)
sample("clamp hardtanh", F(4, 6), -0.5, 0.5)
sample("clamp.Tensor", F(4, 6), F(6), None)
sample("clamp_min clamp_max", F(4, 6), 0.0)
sample("addcmul addcdiv", F(4, 6), F(4, 6), U(6), value=0.5)
sample("lerp.Scalar", F(4, 6), F(4, 6), 0.3)
sample("lerp.Tensor", F(4, 6), F(4, 6), U(6))
sample("where.self", B(4, 6), F(4, 6), F(6))
sample("where.self", B(4, 6), F(), F(4, 6))
sample("where.self", B(2, 1, 4, 4), F(2, 3, 4, 4), F())
sample("where.ScalarOther", B(4, 6), F(4, 6), 0)
sample("where.ScalarOther", B(4, 6), F(4, 6), -1.0)
sample("where.ScalarSelf", B(4, 6), 0.0, F(4, 6))
sample("where.Scalar", B(4, 6), 0.0, 1.0)
sample("masked_fill.Scalar", F(2, 4, 6), B(4, 1), 0)
sample("masked_fill.Scalar", F(2, 4, 6), B(2, 4, 6), float("-inf"))
sample("masked_fill.Tensor", F(2, 4, 6), B(4, 6), F())
sample("fill.Scalar", F(4, 6), 1.5)
sample("fill.Scalar", F(4, 6), 0)
sample("fill.Tensor", F(4, 6), F())
sample("copy", F(4, 6), F(6))
sample("copy", F(4, 6), F(4, 6))
sample(
    """gelu_backward silu_backward tanh_backward sigmoid_backward hardsigmoid_backward
    hardswish_backward""",
    F(4, 3),
    F(4, 3),
)
sample("threshold_backward", F(4, 3), F(4, 3), 0)
sample("leaky_relu_backward", F(4, 3), F(4, 3), 0.01, False)
sample("elu_backward", F(4, 3), 1.0, 1.0, 1.0, False, F(4, 3))
sample("hardtanh_backward", F(4, 3), F(4, 3), -1.0, 1.0)
sample("softplus_backward", F(4, 3), F(4, 3), 1.0, 20.0)
sample("log_sigmoid_backward", F(4, 3), F(4, 3), U(4, 3))
sample("native_dropout_backward", F(4, 3), B(4, 3), 2.0)
sample("view.dtype", F(4, 6), torch.int64)

# views
sample("alias detach lift_fresh getitem", F(4, 3))
sample("t", F(4, 6))
sample("t", F(6))
sample("t", F())
sample("transpose.int", F(4, 6, 3), 0, -1)
sample("transpose.int", F(2, 6, 3, 4), 1, 2)
sample("permute", F(4, 6, 3), [2, 0, 1])
sample("permute", F(2, 4, 6, 3), [0, -2, 1, 3])
for shape, size in (
    ((2, 6, 4), [12, 4]),
    ((12, 4), [2, 6, 4]),
    ((2, 4, 18), [2, 4, 6, 3]),
    ((4, 6, 6), [2, 2, 36]),
    ((4, 3), [6, 2]),
    ((4, 3, 4), [6, 2, 4]),
    ((2, 1, 6), [1, 12, 1]),
    ((4, 6), [24]),
    ((4, 6), [-1, 2]),
    ((1,), []),
    ((), [1, 1]),
    ((5, 7), [35]),
):
    sample("view _unsafe_view reshape", F(*shape), size)
sample("squeeze", F(4, 1, 6, 1))
sample("squeeze.dim", F(4, 1, 6), 1)
sample("squeeze.dim", F(4, 1, 6), 0)
sample("squeeze.dims", F(4, 1, 6, 1), [1, 3])
sample("unsqueeze", F(4, 6), 1)
sample("unsqueeze", F(4, 6), -1)
sample("expand", F(4, 1, 3), [2, 4, 6, 3])
sample("expand", F(4, 1), [-1, 6])
sample("expand", F(), [4])
sample("slice.Tensor", F(4, 6), 1, 2, 4)
sample("slice.Tensor", F(4, 12), 1, 6, 9223372036854775807)
sample("slice.Tensor", F(4, 12), -1, 0, 6)
sample("slice.Tensor", F(4, 12), -1, -4, 12)
sample("slice.Tensor", F(4, 12), 0, 0, 9223372036854775807)
sample("slice.Tensor", F(4, 6), 1, 1, 5)
sample("slice.Tensor", F(4, 6), 1, 0, -1)
sample("slice.Tensor", F(4, 6), 1, 0, 6, 2)
sample("narrow", F(4, 12), 1, 4, 4)
sample("narrow", F(4, 12), 1, 3, 4)
sample("select.int", F(4, 6, 3), 1, 2)
sample("select.int", F(4, 6), -1, -1)
sample("unbind.int", F(3, 4, 6), 0)
sample("unbind.int", F(4, 3), -1)
sample("split.Tensor unsafe_split.Tensor", F(4, 12), 4, 1)
sample("split.Tensor unsafe_split.Tensor", F(5, 6), 2, 0)
sample("split.Tensor unsafe_split.Tensor", F(4, 6), 6, 1)
sample("split_with_sizes", F(4, 12), [4, 4, 4], -1)
sample("split_with_sizes", F(4, 12), [8, 4], 1)
sample("view_as_complex", F(4, 6, 2))
sample("view_as_real", C(4, 6))

# pieces put back, joins, new tensors
sample("slice_backward", F(4, 2), [4, 6], 1, 2, 4, 1)
sample("slice_backward", F(4, 6), [4, 12], -1, 6, 9223372036854775807, 1)
sample("slice_backward", F(4, 4), [4, 6], 1, 1, 5, 1)
sample("slice_scatter", F(4, 12), F(4, 6), 1, 6, 12)
sample("slice_scatter", F(4, 6), F(4, 5), 1, 1)
sample("select_backward", F(4, 3), [4, 6, 3], 1, 2)
sample("select_scatter", F(4, 6, 3), F(4, 3), 1, 2)
sample("cat", [F(4, 6), F(4, 6)], -1)
sample("cat", [F(4, 6), F(2, 6), F(4, 6)])
sample("cat", [F(4, 6)], 1)
sample("stack", [F(4, 6), F(4, 6)], 1)
sample("stack", [F(4, 6), F(4, 6)])
sample("constant_pad_nd", F(4, 6), [1, 2])
sample("constant_pad_nd", F(4, 3, 6), [0, 0, -1, 2], 0.0)
sample("constant_pad_nd", I(4, 6, high=9), [0, 1], -100)
sample("repeat", F(4, 3), [2, 3, 2])
sample("repeat", F(4, 1), [1, 6])
sample("flip", F(4, 6), [1])
sample("roll", F(4, 6), [1], [-1])
sample("roll", F(4, 6), [1])
sample("tril triu", F(2, 4, 6))
sample("tril triu", F(4, 4), 1)
sample("zeros_like empty_like", F(4, 6))
sample("full_like", F(4, 6), 2.0)
sample("full_like", F(4, 6), 0)
sample("new_zeros new_ones new_empty", F(4, 6), [4, 6])
sample("new_zeros new_ones new_empty", F(4, 6), [2, 9])
sample("new_empty_strided", F(4, 6), [4, 6], [1, 4])
sample("new_full", F(4, 6), [4, 6], 0)
sample("new_full", F(4, 6), [6], 3.0)
sample("arange", 6)
sample("arange.start", 2, 6)
sample("arange.start_step", 2, 8, 2)
sample("empty.memory_format ones zeros rand randn", [4, 6])
sample("eye randperm", 4)
sample("full", [4, 6], 1.0)
sample("linspace", 0.0, 1.0, 6)
sample("randint", 5, [4, 6])
sample("randint.low", 2, 5, [4, 6])
sample("scalar_tensor", 1.0)
sample("bernoulli rand_like randn_like", U(4, 6))
sample("bernoulli.p geometric", U(4, 6), 0.5)
sample("bernoulli.Tensor", F(4, 6), U(4, 6))
sample("cauchy exponential log_normal normal_functional random uniform", F(4, 6))
sample("multinomial", U(4, 6), 2)
sample("normal.Tensor_Tensor", F(4, 6), U(4, 6))
sample("normal.Tensor_float poisson", U(4, 6))
sample("normal.float_Tensor", 0.5, U(4, 6))
sample("randint_like random.to", F(4, 6), 5)
sample("randint_like.low_dtype random.from", F(4, 6), 2, 5)
sample("native_dropout", F(4, 6), 0.5, True)

# reductions
for dim, keep in (([0], False), ([1, 2], True), ([-1], False), (None, False)):
    sample("sum.dim_IntList mean.dim", F(4, 6, 3), dim, keep)
    sample("var.correction std.correction var_mean.correction", F(4, 6, 3), dim, keepdim=keep)
    sample("linalg_vector_norm", F(4, 6, 3), 2, dim, keep)
sample("sum mean", F(4, 6))
sample("sum", B(4, 6))
sample("sum.dim_IntList", I(4, 6, high=9), [1])
sample("sum.dim_IntList", F(), [0])
sample("histc", F(4, 6), 5, -2.0, 2.0)
sample("histc", F(4, 6), 4)
sample("count_nonzero.dim_IntList", I(4, 6, high=2), [1])
sample("amax amin", F(4, 6, 3), [1], True)
sample("amax amin", F(4, 6, 3))
sample("argmax argmin", F(4, 6), -1)
sample("argmax argmin", F(4, 6))
sample("max.dim min.dim", F(4, 6), 1, True)
sample("prod.dim_int", F(4, 6), 1)
sample("logsumexp amax", F(), [0])
sample("logsumexp", F(4, 6, 3), [1, 2])
sample("logsumexp", F(3, 8), [1])
sample("all.dim any.dim", B(4, 6), 1)
sample("all.dims any.dims", B(4, 6, 3), [0, 1])
sample("all any max min prod", F(4, 6))

# along one dim
sample("_log_softmax _softmax", F(4, 6, 3), 1, False)
sample("_log_softmax _softmax", F(4, 6), -1, False)
sample("_log_softmax _softmax", F(3, 8), -1, False)
sample("_safe_softmax", F(4, 6), -1)
sample("_log_softmax_backward_data _softmax_backward_data", F(4, 6), F(4, 6), -1, torch.float64)
sample("_log_softmax_backward_data _softmax_backward_data", F(3, 8), F(3, 8), -1, torch.float64)
sample("cumsum cumprod argsort cummax cummin logcumsumexp", F(4, 6), 0)
sample("cumsum", I(4, 6, high=9), -1)
sample("sort", F(4, 6))
sample("sort", F(4, 6), 0)
sample("sort.stable", F(4, 6), stable=True, dim=0)
sample("topk", F(4, 6), 2)
sample("topk", F(4, 6), 2, 0)

# norms
sample("native_layer_norm", F(4, 3, 6), [6], F(6), F(6), 1e-5)
sample("native_layer_norm", F(4, 3, 6), [3, 6], None, None, 1e-5)
sample("native_layer_norm", F(4, 6), [6], F(6), None, 1e-5)
sample("native_layer_norm", F(3, 8), [8], F(8), F(8), 1e-5)
_LN_BACKWARD = (F(4, 3, 6), F(4, 3, 6), [6], F(4, 3, 1), U(4, 3, 1))
sample("native_layer_norm_backward", *_LN_BACKWARD, F(6), F(6), [True, True, True])
sample("native_layer_norm_backward", *_LN_BACKWARD, None, None, [True, False, False])
_WIDE = (F(3, 8), F(3, 8), [8], F(3, 1), U(3, 1))
sample("native_layer_norm_backward", *_WIDE, F(8), F(8), [True, True, True])
sample("_fused_rms_norm", F(4, 3, 6), [6], F(6), 1e-5)
sample("_fused_rms_norm", F(4, 6), [6], None, 1e-5)
sample("_fused_rms_norm", F(3, 8), [8], F(8), 1e-5)
_RMS_BACKWARD = (F(4, 3, 6), F(4, 3, 6), [6], U(4, 3, 1))
sample("_fused_rms_norm_backward", *_RMS_BACKWARD, F(6), [True, True])
sample("_fused_rms_norm_backward", *_RMS_BACKWARD, None, [True, False])
sample("_fused_rms_norm_backward", F(3, 8), F(3, 8), [8], U(3, 1), F(8), [True, True])
# indices and losses
sample("embedding", F(9, 6), I(4, 3, high=9))
sample("embedding", F(9, 6), I(2, 3, 2, high=9), 0)
sample("embedding", F(9, 6), I(4, high=9))
sample("embedding", F(8, 6), I(5, high=8), 3)
sample("embedding_dense_backward", F(4, 3, 6), I(4, 3, high=9), 9, -1, False)
sample("embedding_dense_backward", F(4, 6), I(4, high=9), 9, 2, True)
sample("embedding_dense_backward", F(5, 6), I(5, high=8), 8, 3, False)
_BAGS, _IDS = torch.tensor([0, 3, 5, 6]), I(8, high=9)
_BAG_OF, _COUNTS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3]), torch.tensor([3, 2, 1, 2])
for mode in (0, 1, 2):
    largest = I(4, 6, high=9) if mode == 2 else torch.tensor([0, 0, 0, 0])
    sample("_embedding_bag _embedding_bag_forward_only", F(9, 6), _IDS, _BAGS, False, mode)
    _OF_BAGS = (F(4, 6), _IDS, _BAGS, _BAG_OF, _COUNTS, largest)
    sample("_embedding_bag_backward", *_OF_BAGS, 9, False, mode, False, None)
for reduction in (0, 2):
    for weight in (None, U(6)):
        sample("nll_loss_forward", F(4, 6), I(4, high=6), weight, reduction, 2)
        grad = F(4) if reduction == 0 else F()
        sample("nll_loss_backward", grad, F(4, 6), I(4, high=6), weight, reduction, 2, F())
sample("nll_loss_forward", F(6), I(high=6), None, 2, -100)
sample("nll_loss_forward", F(3, 8), I(3, high=8), U(8), 2, 2)
sample("nll_loss_backward", F(), F(3, 8), I(3, high=8), U(8), 2, 2, F())
sample("nll_loss_backward", F(), F(4, 6), I(4, high=6), None, 1, -100, U())
sample("nll_loss2d_forward", F(4, 6, 2, 3), I(4, 2, 3, high=6), None, 2, -100)
sample("nll_loss2d_forward", F(4, 6, 2, 3), I(4, 2, 3, high=6), U(6), 0, 1)
sample("nll_loss2d_backward", F(), F(4, 6, 2, 3), I(4, 2, 3, high=6), None, 2, -100, F())
sample("gather", F(4, 6), 1, I(4, 3, high=6))
sample("gather", F(4, 6, 3), -2, I(4, 2, 3, high=6))
sample("gather", F(4, 6), 1, I(2, 3, high=6))
sample("scatter.src scatter_add", F(4, 6), 1, I(4, 1, high=6), F(4, 1))
sample("scatter_add", F(4, 6), 0, I(2, 6, high=4), F(2, 6))
sample("scatter_add", F(4, 6), 0, I(2, 3, high=4), F(2, 3))
sample("scatter.value", F(4, 6), 1, I(4, 2, high=6), 0)
sample("scatter.value", F(4, 6), 1, I(4, 2, high=6), 1.0)
for how in ("sum", "mean", "amax", "prod"):
    sample("scatter_reduce.two", F(4, 6), 1, I(4, 3, high=6), F(4, 3), how)
sample("scatter_reduce.two", F(4, 6), 1, I(4, 3, high=6), F(4, 3), "sum", include_self=False)
sample("bucketize.Tensor", F(4, 6), S(5))
sample("searchsorted.Tensor", S(5), F(4, 6))
sample("searchsorted.Tensor", S(4, 5), F(4, 6), right=True)
sample("index_select", F(4, 6, 3), 1, I(4, high=6))
sample("index_add", F(4, 6, 3), 1, I(4, high=6), F(4, 4, 3))
_INDEX = "index.Tensor _unsafe_index.Tensor"
sample(_INDEX, F(9, 6), [I(4, 3, high=9)])
sample(_INDEX, F(4, 9, 6), [None, I(3, high=9)])
sample(_INDEX, F(4, 9, 6), [I(4, 1, high=4), I(3, high=9)])
sample(_INDEX, F(4, 9, 6), [I(4, high=4), None, I(4, high=6)])
_PUT = "index_put _unsafe_index_put"
sample(_PUT, F(9, 6), [I(4, 3, high=9)], F(4, 3, 6), True)
sample(_PUT, F(4, 9, 6), [None, I(3, high=9)], F(3, 1), True)
sample(_PUT, F(4, 9, 6), [I(2, high=4), None, I(2, high=6)], F(2, 9), True)

# attention
_QKV = (F(2, 4, 6, 4), F(2, 4, 3, 4), F(2, 4, 3, 6))
_GROUPED = (F(2, 6, 4, 2), F(2, 2, 4, 2), F(2, 2, 4, 2))
_SDPA = "autopar.sdpa.default"
sample(_SDPA, *_QKV, None, False, None)
sample(_SDPA, *_QKV, B(2, 1, 6, 3), False, 0.5)
sample(_SDPA, *_QKV, F(4, 6, 3), False, None)
sample(_SDPA, *_QKV, F(2, 4, 1, 3), False, None)
sample(_SDPA, *_GROUPED, None, True, None)
sample(_SDPA, *_GROUPED, None, False, None)
sample(_SDPA, *_GROUPED, F(1, 6, 4, 4), False, None)
_BACKWARD = "autopar.sdpa_backward.default"
for qkv, mask, causal in (
    (_QKV, None, False),
    (_QKV, F(2, 1, 6, 3), False),
    (_GROUPED, None, True),
    (_GROUPED, F(2, 6, 4, 4), False),
):
    q, k, v = (x.shape for x in qkv)
    out, lse = F(*q[:3], v[3]), U(*q[:3])
    sample(_BACKWARD, out, *qkv, out, lse, mask, causal, None)
