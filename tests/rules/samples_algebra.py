"""Arguments to prove the rules of linear algebra, transforms and special functions with."""

from __future__ import annotations

import torch

from tests.rules.making import C, F, I, U
from tests.rules.sampling import sample

sample(
    """angle digamma erfinv i0 lgamma signbit special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_erfcx special_i0e special_i1 special_i1e
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 frexp.Tensor""",
    U(4, 6),
)
_POLYNOMIALS = " ".join(
    f"special_{kind}"
    for kind in (
        *(f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"),
        "hermite_polynomial_h",
        "hermite_polynomial_he",
        "laguerre_polynomial_l",
        "legendre_polynomial_p",
    )
)
sample(_POLYNOMIALS, U(4, 6), I(4, 6, high=4))
sample(_POLYNOMIALS, U(2, 4, 6), I(4, 1, high=4))
_PAIRS = "copysign.Tensor fmax fmin hypot nextafter complex polar"
sample(_PAIRS, F(4, 6), F(4, 6))
sample("igamma igammac special_zeta", U(4, 6), U(4, 6))
sample("ldexp.Tensor", F(4, 6), I(6, high=5))
sample(
    "gcd lcm bitwise_left_shift.Tensor bitwise_right_shift.Tensor", I(4, 6, high=9), I(6, high=5)
)
sample("round.decimals", F(4, 6), decimals=1)
sample("polygamma", 1, U(4, 6))
_MATRIX = torch.eye(3, dtype=torch.float64) * 4 + 0.3
_BATCH = torch.stack([_MATRIX + k * torch.eye(3, dtype=torch.float64) for k in range(4)])
sample(
    """cholesky cholesky_inverse linalg_matrix_exp linalg_eig geqrf
    linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex linalg_ldl_factor_ex linalg_lu _linalg_det
    _linalg_slogdet linalg_qr""",
    _BATCH,
)
sample("_linalg_svd _linalg_eigh", _BATCH)
sample("linalg_householder_product", F(4, 6, 3), U(4, 3))
_LU, _PIVOTS = torch.ops.aten.linalg_lu_factor_ex.default(_BATCH)[:2]
sample("lu_unpack", _LU, _PIVOTS)
sample("linalg_solve_triangular", _BATCH, F(4, 3, 2), upper=True)
sample("cholesky_solve", F(4, 3, 2), _BATCH)
sample("triangular_solve", F(4, 3, 2), _BATCH)
sample("_linalg_solve_ex", _BATCH, F(4, 3, 2))
sample("linalg_lu_solve", _LU, _PIVOTS, F(4, 3, 2))
_LDL, _ORDER = torch.ops.aten.linalg_ldl_factor_ex.default(_BATCH)[:2]
sample("linalg_ldl_solve", _LDL, _ORDER, F(4, 3, 2))
sample("ormqr", F(4, 3, 3), U(4, 3), F(4, 3, 2))
sample("_fft_r2c", F(4, 6, 3), [1], 0, True)
sample("_fft_r2c", F(4, 6), [1], 0, False)
sample("_fft_c2r", C(4, 6, 4), [2], 0, 6)
sample("_fft_c2c", C(4, 6, 3), [0, 2], 0, True)
sample("_conj_physical", C(4, 6))
sample("diagonal", F(4, 6, 3))
sample("diagonal", F(2, 4, 6), 1, -2, -1)
sample("diagonal_scatter", F(2, 4, 6), F(2, 4), 1, -2, -1)
sample("unfold", F(4, 6, 3), 1, 2, 2)
sample("_cdist_forward", F(4, 6, 3), F(4, 2, 3), 2.0, None)
sample("_cdist_backward", F(4, 6, 2), F(4, 6, 3), F(4, 2, 3), 2.0, U(4, 6, 2))
