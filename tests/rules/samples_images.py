"""Arguments to prove the rules of ops on images with, and of norms over batches."""

from __future__ import annotations

from tests.rules.making import F, I, U
from tests.rules.sampling import sample

sample("_adaptive_avg_pool2d", F(4, 6, 4, 4), [2, 1])
sample("_adaptive_avg_pool2d_backward", F(4, 6, 2, 1), F(4, 6, 4, 4))
sample("avg_pool2d", F(4, 6, 4, 4), [2, 2])
sample(
    "avg_pool2d_backward", F(4, 6, 2, 2), F(4, 6, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None
)
sample("max_pool2d_with_indices", F(4, 6, 4, 4), [2, 2])
_POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)
sample(
    "max_pool2d_with_indices_backward", F(4, 6, 2, 2), F(4, 6, 4, 4), *_POOL, I(4, 6, 2, 2, high=16)
)
for op, x, size in (
    ("avg_pool1d", F(4, 6, 4), [2]), ("avg_pool3d", F(2, 4, 2, 4, 2), [2, 2, 2]),
    ("reflection_pad1d replication_pad1d", F(4, 6, 4), [1, 2]),
    ("reflection_pad2d replication_pad2d", F(4, 6, 4, 4), [1, 2, 0, 1]),
    ("reflection_pad3d replication_pad3d", F(2, 4, 2, 4, 2), [1, 1, 0, 1, 1, 0]),
    ("adaptive_max_pool2d", F(4, 6, 4, 4), [2, 1]),
    ("max_pool3d_with_indices", F(2, 4, 4, 4, 2), [2, 2, 2]),
    ("adaptive_max_pool3d _adaptive_avg_pool3d", F(2, 4, 4, 4, 2), [2, 2, 1]),
):  # fmt: skip
    sample(op, x, size)
sample("_adaptive_avg_pool3d_backward", F(2, 4, 2, 2, 1), F(2, 4, 4, 4, 2))
sample("adaptive_max_pool2d_backward", F(4, 6, 2, 1), F(4, 6, 4, 4), I(4, 6, 2, 1, high=16))
sample(
    "adaptive_max_pool3d_backward", F(2, 4, 2, 2, 1), F(2, 4, 4, 4, 2), I(2, 4, 2, 2, 1, high=32)
)
_POOL3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
sample("avg_pool3d_backward", F(2, 4, 2, 2, 1), F(2, 4, 4, 4, 2), *_POOL3, False, True, None)
sample(
    "max_pool3d_with_indices_backward", F(2, 4, 2, 2, 1), F(2, 4, 4, 4, 2), *_POOL3, [1, 1, 1],
    False, I(2, 4, 2, 2, 1, high=32),
)  # fmt: skip
sample("fractional_max_pool2d", F(4, 6, 4, 4), [2, 2], [2, 2], U(4, 6, 2))
sample("fractional_max_pool3d", F(2, 4, 4, 4, 4), [2, 2, 2], [2, 2, 2], U(2, 4, 3))
sample(
    "fractional_max_pool2d_backward", F(4, 6, 2, 2), F(4, 6, 4, 4), [2, 2], [2, 2],
    I(4, 6, 2, 2, high=16),
)  # fmt: skip
sample(
    "fractional_max_pool3d_backward", F(2, 4, 2, 2, 2), F(2, 4, 4, 4, 4), [2, 2, 2], [2, 2, 2],
    I(2, 4, 2, 2, 2, high=64),
)  # fmt: skip
_PADS = "reflection_pad1d_backward replication_pad1d_backward"
sample(_PADS, F(4, 6, 7), F(4, 6, 4), [1, 2])
_PADS = _PADS.replace("1d", "2d")
sample(_PADS, F(4, 6, 5, 7), F(4, 6, 4, 4), [1, 2, 0, 1])
_PADS = _PADS.replace("2d", "3d")
sample(_PADS, F(2, 4, 3, 5, 4), F(2, 4, 2, 4, 2), [1, 1, 0, 1, 1, 0])
_AA = "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
sample(_AA, F(4, 6, 4, 4), [2, 3], False)
_AA = "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
sample(_AA, F(4, 6, 2, 3), [2, 3], [4, 6, 4, 4], False)
for space in (2, 3):
    image, grid, result = F(4, 6, *(4,) * space), U(4, *(2,) * space, space), (2,) * space
    sample(f"grid_sampler_{space}d", image, grid, 0, 0, False)
    for mask in ([True, True], [False, True]):
        sample(f"grid_sampler_{space}d_backward", F(4, 6, *result), image, grid, 0, 0, False, mask)
_STRIDES = ([1, 1], [1, 1], [1, 1], False, [0, 0])
_STRIDES3 = ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0])
sample("convolution", F(2, 4, 5, 5), F(6, 4, 3, 3), None, *_STRIDES, 1)
sample("convolution", F(2, 4, 5, 5), F(6, 4, 3, 3), F(6), *_STRIDES, 1)
sample("convolution", F(2, 4, 5, 5), F(6, 2, 3, 3), F(6), *_STRIDES, 2)
sample("convolution", F(2, 4, 5), F(4, 6, 3), None, [2], [0], [1], True, [0], 1)
sample("convolution", F(2, 4, 5, 5), F(4, 1, 3, 3), None, *_STRIDES, 4)
sample("convolution", F(2, 8, 5, 5), F(8, 4, 3, 3), None, *_STRIDES, 2)
sample("convolution", F(2, 8, 5), F(8, 3, 3), F(12), [2], [0], [1], True, [0], 4)
sample("convolution", F(2, 4, 3, 3, 3), F(6, 4, 3, 3, 3), None, *_STRIDES3, 1)
sample(
    "convolution_backward", F(2, 12, 11), F(2, 8, 5), F(8, 3, 3), [12], [2], [0], [1], True, [0], 4,
    [True, True, False],
)  # fmt: skip
for mask, groups, weight in (
    ([True, True, True], 1, F(6, 4, 3, 3)),
    ([True, True, False], 1, F(6, 4, 3, 3)),
    ([False, True, True], 1, F(6, 4, 3, 3)),
    ([True, True, True], 2, F(6, 2, 3, 3)),
):
    sample(
        "convolution_backward", F(2, 6, 5, 5), F(2, 4, 5, 5), weight, [6], *_STRIDES, groups, mask
    )


_C = (F(6), F(6), F(6), U(6))
sample("_native_batch_norm_legit_no_training", F(4, 6, 2, 3), *_C, 0.1, 1e-5)
sample("_native_batch_norm_legit_no_training", F(4, 6), None, None, F(6), U(6), 0.1, 1e-5)
_BN_BACKWARD = (F(4, 6, 2, 3), F(4, 6, 2, 3), F(6), F(6), U(6))
for statistics in ((None, None), (F(0), F(0))):
    for mask in ([True, True, True], [True, False, False]):
        sample("native_batch_norm_backward", *_BN_BACKWARD, *statistics, False, 1e-5, mask)

sample("native_group_norm", F(4, 6, 3), F(6), F(6), 4, 6, 3, 2, 1e-5)
sample("native_group_norm", F(4, 6, 2, 2), None, None, 4, 6, 4, 3, 1e-5)
_GN_BACKWARD = (F(4, 6, 3), F(4, 6, 3), F(4, 2), U(4, 2))
sample("native_group_norm_backward", *_GN_BACKWARD, F(6), 4, 6, 3, 2, [True, True, True])
sample("native_group_norm_backward", *_GN_BACKWARD, None, 4, 6, 3, 2, [True, False, False])
