"""Linear algebra on batches of matrices, transforms along dims, diagonals, distances."""

from __future__ import annotations

from autopar.ir.graph import Ref
from autopar.rules.notation import (
    Call,
    Dims,
    Rule,
    RuleFunction,
    dim_of,
    letters,
    linear,
    rule,
    singles,
)
from autopar.rules.op import Family, Op


def batched(tails: str) -> RuleFunction:
    """Leading dims, which all tensors have, are parallel; the last ones of each tensor are whole.
    `tails` counts those of inputs and outputs: "2 -> 2 1 2" is the singular value decomposition."""
    before, after = ([int(n) for n in side.split()] for side in tails.split("->"))

    def function(call: Call) -> Rule | None:
        shapes = [t.shape for t in (*call.inputs, *call.outputs)]
        counts = [*before, *after]
        if len(shapes) != len(counts):
            return None
        leads = {shape[: len(shape) - n] for shape, n in zip(shapes, counts, strict=True)}
        if len(leads) != 1:
            return None
        lead = letters(len(leads.pop()), "b")
        ends = [letters(n, f"x{k}_") for k, n in enumerate(counts)]
        dims = [singles((*lead, *end)) for end in ends]
        split = len(before)
        return rule(dims[:split], dims[split:], whole=[a for end in ends for a in end])

    return function


def transform(call: Call) -> Rule:
    """aten._fft_r2c, _fft_c2r and _fft_c2c(x, dims, ...): the transformed dims are whole."""
    rank = len(call.out)
    dims = {dim_of(d, rank) for d in call.integers(1, "dim") or ()}
    source, result = letters(rank), list(letters(rank))
    for d in dims:
        result[d] = f"o{d}"
    whole = [a for d in dims for a in (source[d], result[d])]
    # A real result of partial complex numbers is still their sum.
    return rule([singles(source)], [singles(result)], whole=whole, partial=linear(call, (Ref(0),)))


def diagonal(call: Call) -> Rule:
    """aten.diagonal(x, offset, dim1, dim2): the two dims become the last one, all whole."""
    source, result = _diagonal_dims(call, 1, len(call.shapes[0]))
    return rule([source], [result], whole=_ends(source, result), partial=linear(call, (Ref(0),)))


def diagonal_scatter(call: Call) -> Rule:
    """aten.diagonal_scatter(x, source, offset, dim1, dim2)."""
    source, result = _diagonal_dims(call, 2, len(call.out))
    return rule(
        [source, result],
        [source],
        whole=_ends(source, result),
        partial=linear(call, (Ref(0), Ref(1))),
    )


def _diagonal_dims(call: Call, at: int, rank: int) -> tuple[Dims, Dims]:
    first, second = (
        dim_of(call.integer(at + k, f"dim{k}", default), rank) for k, default in ((1, 0), (2, 1))
    )
    names = letters(rank)
    rest = [name for d, name in enumerate(names) if d not in (first, second)]
    return singles(names), singles((*rest, "g"))


def _ends(source: Dims, result: Dims) -> set[str]:
    """The letters that only one of two tensors has."""
    return {a for dim in source for a in dim} ^ {a for dim in result for a in dim}


def window(call: Call) -> Rule:
    """aten.unfold(x, dim, size, step): windows over a dim, which go into a new last one."""
    rank = len(call.shapes[0])
    names = letters(rank)
    dim = dim_of(call.integer(1, "dim"), rank)
    result = (*(f"o{d}" if d == dim else a for d, a in enumerate(names)), "w")
    return rule(
        [singles(names)],
        [singles(result)],
        whole={*names[dim : dim + 1], f"o{dim}", "w"},
        partial=linear(call, (Ref(0),)),
    )


def distances(call: Call) -> Rule:
    """aten._cdist_forward(x, y, ...): of every row of x to every row of y."""
    x, y, pairs = _pairs_of_rows(call)
    return rule([x, y], [pairs], whole="k")


def distances_backward(call: Call) -> Rule:
    """aten._cdist_backward(grad, x, y, p, distances): the gradient of x sums over rows of y."""
    x, y, pairs = _pairs_of_rows(call)
    return rule([pairs, x, y, pairs], [x], whole="k", partial=((0,),))


def _pairs_of_rows(call: Call) -> list[Dims]:
    lead = letters(len(call.out) - 2)
    return [singles((*lead, *ends)) for ends in ("pk", "rk", "pr")]


ALGEBRA: Family = (
    (Op(batched("2 -> 2")), "cholesky cholesky_inverse linalg_matrix_exp"),
    (Op(batched("2 -> 2 1 2")), "_linalg_svd"),
    (Op(batched("2 -> 1 2")), "_linalg_eigh linalg_eig"),
    (Op(batched("2 -> 2 2")), "linalg_qr"),
    (Op(batched("2 -> 2 1")), "geqrf"),
    (Op(batched("2 -> 2 0")), "linalg_cholesky_ex linalg_inv_ex"),
    (Op(batched("2 -> 2 1 0")), "linalg_lu_factor_ex linalg_ldl_factor_ex"),
    (Op(batched("2 -> 2 2 2")), "linalg_lu"),
    (Op(batched("2 -> 0 2 1")), "_linalg_det"),
    (Op(batched("2 -> 0 0 2 1")), "_linalg_slogdet"),
    (Op(batched("2 1 -> 2")), "linalg_householder_product"),
    (Op(batched("2 1 -> 2 2 2")), "lu_unpack"),
    (Op(batched("2 2 -> 2")), "linalg_solve_triangular cholesky_solve"),
    (Op(batched("2 2 -> 2 2")), "triangular_solve"),
    (Op(batched("2 2 -> 2 2 1 0")), "_linalg_solve_ex"),
    (Op(batched("2 1 2 -> 2")), "linalg_lu_solve linalg_ldl_solve ormqr"),
    (Op(transform), "_fft_r2c _fft_c2r _fft_c2c"),
    (Op(diagonal), "diagonal"),
    (Op(diagonal_scatter), "diagonal_scatter"),
    (Op(window), "unfold"),
    (Op(distances), "_cdist_forward"),
    (Op(distances_backward), "_cdist_backward"),
)
