"""Each op that is written in pieces is what it was in one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.tracer.decomposed import DECOMPOSITIONS

aten = torch.ops.aten

SHAPES = ((4, 3), (5, 3, 2), (2, 3, 4, 1))


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def assert_same(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    found, expected = DECOMPOSITIONS[op](*args, **kwargs), op(*args, **kwargs)
    several = isinstance(expected, tuple)
    for new, old in zip(*((x if several else (x,)) for x in (found, expected)), strict=True):
        assert (new is None) == (old is None)
        if old is not None:
            torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12, equal_nan=True)


def statistics() -> list[Tensor]:
    return [drawn(3), drawn(3).abs() + 0.5]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_batch_norm(shape: tuple[int, ...], training: bool, momentum: float) -> None:
    op, x = aten._native_batch_norm_legit_functional.default, drawn(*shape)
    for affine, eps in product((True, False), (1e-5, 0.5)):
        weight, bias = (drawn(3) if affine else None for _ in range(2))
        assert_same(op, x, weight, bias, *statistics(), training, momentum, eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_without_running_statistics(shape: tuple[int, ...]) -> None:
    op, x = aten._native_batch_norm_legit.no_stats, drawn(*shape)
    assert_same(op, x, drawn(3), drawn(3), True, 0.1, 1e-5)
    assert_same(op, x, None, None, True, 0.1, 1e-5)
    assert DECOMPOSITIONS[op](x, None, None, False, 0.1, 1e-5) is NotImplemented


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mask", [[True] * 3, [True, False, False], [False, True, True]], ids=str)
def test_gradient_of_batch_norm(shape: tuple[int, ...], affine: bool, mask: list[bool]) -> None:
    op, x, weight = aten.native_batch_norm_backward.default, drawn(*shape), drawn(3)
    y, mean, invstd = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)
    grad, scale = y.cos(), weight if affine else None
    mask = [mask[0], *(wanted and affine for wanted in mask[1:])]
    assert_same(op, grad, x, scale, *statistics(), mean, invstd, True, 1e-5, mask)
    fixed = (*statistics(), None, None, False, 1e-5, mask)
    assert DECOMPOSITIONS[op](grad, x, scale, *fixed) is NotImplemented


def test_conjugates_are_numbers_of_their_own() -> None:
    x = torch.view_as_complex(drawn(4, 3, 2))
    assert_same(aten._conj.default, x)
    assert not DECOMPOSITIONS[aten._conj.default](x).is_conj()


@pytest.mark.parametrize("correction", [None, 0, 1, 2.5, 4])
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dim", [None, [], [1], [-1, 0]], ids=str)
@pytest.mark.parametrize("op", [aten.var.correction, aten.std.correction, aten.var_mean.correction])
def test_variances(
    op: Callable[..., Any], dim: Sequence[int] | None, keepdim: bool, correction: float | None
) -> None:
    """Also where all that is averaged is one element, or fewer than are taken off."""
    for shape in ((4, 3, 2), (4, 1, 1)):
        assert_same(op, drawn(*shape), dim, correction=correction, keepdim=keepdim)


def test_a_variance_far_from_zero_keeps_its_digits() -> None:
    assert_same(aten.var.correction, drawn(1000) + 1e6, None, correction=1)


def test_complex_numbers_stay_in_one_piece() -> None:
    x = torch.ones(3, dtype=torch.complex128)
    for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction):
        assert DECOMPOSITIONS[op](x) is NotImplemented


def test_every_piece_is_tested() -> None:
    assert set(DECOMPOSITIONS) == {
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_batch_norm_backward.default,
        aten.var.correction,
        aten.std.correction,
        aten.var_mean.correction,
        aten._conj.default,
    }
