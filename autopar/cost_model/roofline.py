"""Seconds of one kernel on one device, from its shapes, its FLOPs and the bytes it moves.

A roofline (Williams, Waterman and Patterson, 2009) whose ceilings depend on the kind of kernel and,
for matmuls, on the shape. The constants are those of `mesh.Kernels`; `cluster/kernels.py` has them
with their sources.

    matmul       start + max(2 (out + wave T S) (k + depth) / (ceiling peak), bytes / (memory B))
    attention    start + max(F + overhead, tail) / (e peak), and no less than its bytes / (memory B)
    streaming    start + bytes / (part B)

A matmul makes `out` elements, each a sum of k terms, in tiles of T = 128 x 128 on S streaming
multiprocessors. Its rate is the ceiling times W / (W + wave) times k / (k + depth), with W = out /
(T S) waves. The form above divides by no size, and its rate never falls.

Attention does F FLOPs, f for each head dim of a score (4 forward, 10 backward). There are R rows
with head dim d over s keys. A row takes as long as with c0 more scores (overhead = f R d c0). The
kernel takes no less than one tile of 128 rows on one multiprocessor (tail = 128 f d (s + c0/c) S,
with c = 1/2 under a causal mask, else 1). The diagonal of a causal mask cuts through tiles; without
one, c0 is a part `FULL` of that. e is lower in backward, for narrow heads, for masks added to the
scores, and for float32, which other kernels compute.

Where the device's kernels were measured (`mesh.Measured`), times are interpolated between the
points, which have all costs of a kernel. The laws go on from the outermost points.

Times never fall as rows, sums or bytes grow. The host's launches are not included: kernels follow
one another on a device whose host is ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from math import exp, isfinite, log

from autopar.ir.mesh import AttentionSeries, Device, MatmulGrid
from autopar.rules.op import Scores

# Interpolation between measured points, linear in logarithms, and extrapolation by a law.
#
# Where measured times rise with each size, so does the result, and it meets the points. Beyond an
# edge of the points, the time at the edge is scaled by the law's ratio, at one value of the other
# size.

Law = Callable[[float], float]


def on_line(points: Sequence[tuple[float, float]], x: float, law: Law) -> float:
    """The value at `x` of a line through `points` (x, y), at least one, positive, x ascending."""
    inside = min(max(x, points[0][0]), points[-1][0])
    low, part = _place([at for at, _ in points], inside)
    y = _between(points[low][1], points[min(low + 1, len(points) - 1)][1], part)
    return y if inside == x else y * law(x) / law(inside)


def on_grid(
    grid: MatmulGrid, out: float, depth: float, law: Callable[[float, float], float]
) -> float:
    """Seconds of a matmul of `out` elements and `depth`; outside of the grid by
    `law(out, depth)`."""
    outs, depths = grid.outs, grid.depths
    inner_out = min(max(out, outs[0]), outs[-1])
    inner_depth = min(max(depth, depths[0]), depths[-1])
    row, down = _place(outs, inner_out)
    column, right = _place(depths, inner_depth)
    across = [
        _between(seconds[column], seconds[min(column + 1, len(depths) - 1)], right)
        for seconds in grid.seconds[row : row + 2]
    ]
    kernel_s = _between(across[0], across[-1], down)
    if inner_out != out:
        at = depths[-1] if out > inner_out else depths[0]
        kernel_s *= law(out, at) / law(inner_out, at)
    if inner_depth != depth:
        at = outs[-1] if depth > inner_depth else outs[0]
        kernel_s *= law(at, depth) / law(at, inner_depth)
    return kernel_s


def _place(xs: Sequence[float], x: float) -> tuple[int, float]:
    """The last of `xs` that is not beyond `x`, and how far along to the next it lies."""
    low = min(bisect_right(xs, x), len(xs)) - 1
    if low + 1 == len(xs) or x == xs[low]:
        return low, 0.0
    return low, log(x / xs[low]) / log(xs[low + 1] / xs[low])


def _between(low: float, high: float, part: float) -> float:
    return low if part == 0 else exp((1 - part) * log(low) + part * log(high))


_TILE_ROWS = 128
FULL = 0.4
"""c0 without a mask, as a part of c0 with one. Measured: 0.27 to 0.3 on H100 and H200
(FlashAttention 3, ViT beside causal; ai-dynamo/aiconfigurator), 0.4 on B200 (FlashAttention 2)."""
_HEAD_DIM = 128
"""The head dim to which the ceiling of attention belongs; narrow heads have half of it."""


def stream_s(bytes_moved: float, device: Device, part: float | None = None) -> float:
    """Seconds in which a kernel moves `bytes_moved` bytes of device memory at `part` of its
    bandwidth, by default that of pointwise kernels, without the start (`floor_s`). ValueError if
    the bytes are negative, infinite or not a number."""
    _check(bytes_moved)
    reached = device.kernels.pointwise if part is None else part
    return bytes_moved / (reached * device.memory_bytes_per_s)


def matmul_s(
    out_elements: float, depth: float, bytes_moved: float, dtype: str, device: Device
) -> float:
    """Seconds of one kernel that makes `out_elements` sums of `depth` terms each, in `dtype`
    ("bfloat16"), and moves `bytes_moved` bytes. ValueError as in `stream_s`."""
    _check(out_elements, depth, bytes_moved)
    its = device.kernels

    def compute_s(out_elements: float, depth: float) -> float:
        return its.matmul_flops(out_elements, depth) / (its.matmul * device.peak(dtype))

    memory_s = stream_s(bytes_moved, device, its.matmul_memory)
    start_s = device.floor_s(its.matmul_start_s)
    for grid in device.measured.matmuls:
        if grid.dtype == dtype:
            kernel_s = on_grid(
                grid, out_elements, depth, lambda out, k: start_s + compute_s(out, k)
            )
            return max(kernel_s, memory_s) + _called_s(device, grid.seconds[0][0])
    return start_s + max(compute_s(out_elements, depth), memory_s)


def pointwise_s(bytes_moved: float, device: Device, part: float, *, starts: bool) -> float:
    """Seconds of a kernel that does little but move its bytes, at `part` of the bandwidth. Without
    `starts`, it is a part of another kernel, and has no start. ValueError as in `stream_s`."""
    start_s = device.floor_s(device.kernels.start_s)
    points = device.measured.pointwise
    if not points:
        return stream_s(bytes_moved, device, part) + (start_s if starts else 0.0)
    _check(bytes_moved)
    slower = device.kernels.pointwise / part
    least_s = points[0][1]
    kernel_s = on_line(points, bytes_moved, lambda moved: start_s + stream_s(moved, device))
    called_s = least_s + _called_s(device, least_s)
    return slower * max(0.0, kernel_s - least_s) + (called_s if starts else 0.0)


def _called_s(device: Device, least_s: float) -> float:
    """Seconds that a CPU takes more for an op among others than for repeated calls of it, of which
    the smallest was measured as `least_s`."""
    return max(0.0, device.launch_s - least_s) if device.kind == "cpu" else 0.0


def attention_s(
    flops: float, scores: Scores, bytes_moved: float, dtype: str, device: Device
) -> float:
    """Seconds of attention that does `flops` on `scores`, in as many kernels as it has passes, and
    moves `bytes_moved` bytes. ValueError as in `stream_s`.

    Measured points correct the law by its error at this number of keys."""
    _check(flops, bytes_moved)
    kernel_s = _attention_s(flops, scores, bytes_moved, dtype, device)
    for series in device.measured.attention:
        if series.backward == scores.backward and series.dtype == dtype:
            law = partial(_causal_s, series, device)
            keys = min(max(scores.keys, series.seconds[0][0]), series.seconds[-1][0])
            return kernel_s * on_line(series.seconds, keys, law) / law(keys)
    return kernel_s


def _causal_s(series: AttentionSeries, device: Device, keys: float) -> float:
    per_score = 10.0 if series.backward else 4.0
    rows, head_dim = series.rows, series.head_dim
    scores = Scores(rows, round(keys), head_dim, per_score, True, series.backward)
    flops = per_score * head_dim * rows * keys / 2
    return _attention_s(flops, scores, 0.0, series.dtype, device)


def _attention_s(
    flops: float, scores: Scores, bytes_moved: float, dtype: str, device: Device
) -> float:
    """Seconds of attention by the law."""
    its = device.kernels
    per_pass = scores.per_score * scores.head_dim
    # One of several kernels under a causal mask has the diagonal.
    masked = 1 / scores.passes if scores.causal else 0.0
    tokens = its.attention_tokens * (FULL + masked * (1 - FULL))
    seen = scores.keys + tokens * (2 if scores.causal else 1)
    overhead = per_pass * scores.rows * tokens
    tail = per_pass * _TILE_ROWS * seen * its.processors
    compute = max(flops + scores.passes * overhead, scores.passes * tail)
    wide = min(1.0, scores.head_dim / _HEAD_DIM)
    # Linear from half the head dim to all of it. Narrower heads compute as many columns as half.
    width = (
        its.attention_narrow * 2 * wide
        if wide < 0.5
        else 1 - 2 * (1 - wide) * (1 - its.attention_narrow)
    )
    reached = its.attention_float32 if dtype == "float32" else its.attention
    if scores.added and dtype != "float32":
        reached *= its.attention_masked
    reached *= width * (its.attention_backward if scores.backward else 1.0)
    compute_s = compute / (reached * device.peak(dtype))
    memory_s = stream_s(bytes_moved, device, its.matmul_memory)
    return scores.passes * device.floor_s(its.start_s) + max(compute_s, memory_s)


def _check(*amounts: float) -> None:
    if not all(isfinite(amount) and amount >= 0 for amount in amounts):
        raise ValueError(f"a kernel cannot do {', '.join(map(str, amounts))}")
