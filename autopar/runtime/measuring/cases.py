"""What a profile measures: a fixed list of sizes for each kind of device, as data.

Matmuls of the usual dtypes are a grid over output sizes and depths; squares give the ceiling of
other dtypes. Attention has a fixed number of tokens, in ever longer sequences.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cases:
    """`matmuls` are (m, k, n, dtype), `attentions` (batch, heads, sequence, head_dim, dtype),
    `pointwise` (elements, dtype); `messages` are in bytes of the side of a collective that is not
    sharded. Times are medians over `repeats` rounds; `pairs`
    are those of a collective beside matmuls. On a CPU a round is as many runs as take `round_s`."""

    matmuls: tuple[tuple[int, int, int, str], ...]
    attentions: tuple[tuple[int, int, int, int, str], ...]
    pointwise: tuple[tuple[int, str], ...]
    messages: tuple[int, ...]
    pairs: int
    repeats: int
    round_s: float


def _squares(dtype: str, *sizes: int) -> tuple[tuple[int, int, int, str], ...]:
    return tuple((size, size, size, dtype) for size in sizes)


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(first, last + 1, step))


def _grid(
    dtype: str, sides: tuple[int, ...], depths: tuple[int, ...]
) -> tuple[tuple[int, int, int, str], ...]:
    return tuple((side, depth, side, dtype) for side in sides for depth in depths)


def _attentions(
    tokens: int, heads: int, head_dim: int, dtype: str, *sequences: int
) -> tuple[tuple[int, int, int, int, str], ...]:
    return tuple((tokens // length, heads, length, head_dim, dtype) for length in sequences)


_CUDA = Cases(
    matmuls=(
        *_grid("bfloat16", _powers(8, 13, 1), (64, 256, 1024, 4096, 16384)),
        *_grid("float32", _powers(8, 13, 1), (64, 512, 4096)),
        *_squares("float16", 8192),
        *_squares("float64", 4096),
    ),
    attentions=_attentions(16384, 32, 128, "bfloat16", 128, 512, 2048, 8192, 16384),
    pointwise=tuple((n, "bfloat16") for n in _powers(10, 28, 2)),
    messages=_powers(10, 30, 2),
    pairs=5,
    repeats=20,
    round_s=0,
)

_CUDA_QUICK = Cases(
    matmuls=(
        *_grid("bfloat16", (1024, 8192), (256, 4096)),
        *_grid("float32", (1024, 4096), (256, 4096)),
        *_squares("float16", 8192),
        *_squares("float64", 4096),
    ),
    attentions=_attentions(8192, 32, 128, "bfloat16", 512, 8192),
    pointwise=tuple((n, "bfloat16") for n in (2**12, 2**18, 2**28)),
    messages=_powers(12, 28, 4),
    pairs=1,
    repeats=5,
    round_s=0,
)

_CPU = Cases(
    matmuls=(
        *_grid("float32", (32, 128, 512, 1536), (32, 128, 512, 2048)),
        *_squares("float64", 256, 512),
        *_squares("bfloat16", 256, 512),
    ),
    attentions=_attentions(512, 4, 64, "float32", 64, 128, 256, 512),
    pointwise=tuple((n, "float32") for n in _powers(10, 24, 2)),
    messages=_powers(10, 26, 2),
    pairs=5,
    repeats=7,
    round_s=0.02,
)

_CPU_QUICK = Cases(
    matmuls=(*_grid("float32", (64, 256), (64, 256)), *_squares("float64", 128)),
    attentions=_attentions(256, 2, 32, "float32", 64, 128),
    pointwise=tuple((n, "float32") for n in (2**12, 2**16, 2**20)),
    messages=_powers(12, 20, 4),
    pairs=1,
    repeats=3,
    round_s=0.002,
)


def cases(kind: str, *, quick: bool) -> Cases:
    """The list for `kind`, "cuda" or anything else (a CPU). `quick` gives the ceilings alone."""
    if kind == "cuda":
        return _CUDA_QUICK if quick else _CUDA
    return _CPU_QUICK if quick else _CPU
