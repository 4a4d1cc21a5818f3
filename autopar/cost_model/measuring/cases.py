"""What a profile measures: a fixed list of sizes for each kind of device, as data.

The matmuls are squares, for the ceiling of each dtype, and the products of GPT-2 and of an 8B Llama
over two numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cases:
    """`matmuls` are (m, k, n, dtype), `attentions` (batch, heads, sequence, head_dim, dtype),
    `pointwise` (elements, dtype); copies are in bytes of the tensor copied, `messages` in bytes of
    the side of a collective that is not sharded. Times are medians over `repeats` rounds; `pairs`
    are those of a collective beside matmuls. On a CPU a round is as many runs as take `round_s`."""

    matmuls: tuple[tuple[int, int, int, str], ...]
    attentions: tuple[tuple[int, int, int, int, str], ...]
    pointwise: tuple[tuple[int, str], ...]
    memory_copies: tuple[int, ...]
    messages: tuple[int, ...]
    pairs: int
    repeats: int
    round_s: float


def _squares(dtype: str, *sizes: int) -> tuple[tuple[int, int, int, str], ...]:
    return tuple((size, size, size, dtype) for size in sizes)


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(first, last + 1, step))


_TOKENS = (2048, 16384)
_LAYERS = (
    (768, 2304), (768, 3072), (3072, 768), (768, 50257),
    (4096, 6144), (4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256),
)  # fmt: skip
"""(k, n) of the products with a weight: GPT-2's, then those of a Llama of 8 billion parameters."""

_CUDA = Cases(
    matmuls=(
        *_squares("bfloat16", 512, 1024, 2048, 4096, 8192, 16384),
        *_squares("float16", 2048, 8192),
        *_squares("float32", 512, 1024, 2048, 4096, 8192),
        *_squares("float64", 2048, 4096),
        *((tokens, k, n, "bfloat16") for tokens in _TOKENS for k, n in _LAYERS),
    ),
    attentions=(
        (8, 12, 1024, 64, "bfloat16"),
        (1, 32, 2048, 128, "bfloat16"),
        (4, 32, 2048, 128, "bfloat16"),
        (1, 32, 8192, 128, "bfloat16"),
        (8, 12, 1024, 64, "float32"),
    ),
    pointwise=tuple((n, dtype) for dtype in ("bfloat16", "float32") for n in _powers(14, 28, 2)),
    memory_copies=_powers(16, 30, 2),
    messages=_powers(10, 30, 2),
    pairs=5,
    repeats=20,
    round_s=0,
)

_CUDA_QUICK = Cases(
    matmuls=(
        *_squares("bfloat16", 1024, 8192),
        *_squares("float16", 8192),
        *_squares("float32", 4096),
        *_squares("float64", 4096),
    ),
    attentions=((4, 32, 2048, 128, "bfloat16"),),
    pointwise=((2**18, "bfloat16"), (2**28, "bfloat16")),
    memory_copies=_powers(20, 30, 10),
    messages=_powers(12, 28, 4),
    pairs=1,
    repeats=5,
    round_s=0,
)

_CPU = Cases(
    matmuls=(
        *_squares("float32", 128, 256, 512, 1024),
        *_squares("float64", 256, 512),
        *_squares("bfloat16", 256, 512),
        (1024, 256, 1024, "float32"),
        (1024, 1024, 256, "float32"),
    ),
    attentions=((1, 4, 256, 64, "float32"), (1, 8, 512, 64, "float32")),
    pointwise=tuple((n, "float32") for n in _powers(12, 24, 3)),
    memory_copies=_powers(14, 28, 2),
    messages=_powers(10, 26, 2),
    pairs=5,
    repeats=7,
    round_s=0.02,
)

_CPU_QUICK = Cases(
    matmuls=(*_squares("float32", 128, 256), *_squares("float64", 128)),
    attentions=((1, 2, 128, 32, "float32"),),
    pointwise=((2**12, "float32"), (2**20, "float32")),
    memory_copies=(2**16, 2**24),
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
