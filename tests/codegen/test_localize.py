"""Arguments that speak of shapes, on local tensors. Numbers are proved by `tests/rules`, which runs
every rule; here are the cases in which local shapes mislead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.codegen.sources import localize
from autopar.rules.op import Shape, Shapes

aten = torch.ops.aten


def local(
    target: Any, args: tuple[Any, ...], whole: tuple[Shape, Shape], here: tuple[Shape, Shape]
) -> torch.Tensor:
    """The op on a local tensor of shape `here[0]`; one input and one output."""
    shapes = Shapes((whole[0],), (whole[1],), (here[0],), (here[1],))
    x = torch.arange(float(torch.Size(here[0]).numel())).reshape(here[0])
    op, new_args, kwargs = localize(target, (x, *args), {}, shapes)
    result = op(*new_args, **kwargs)
    assert tuple(result.shape) == here[1]
    return result


def test_squeeze_leaves_a_dim_of_which_one_element_is_here() -> None:
    local(aten.squeeze.default, (), ((4, 1, 8), (4, 8)), ((1, 1, 8), (1, 8)))
    local(aten.squeeze.dim, (0,), ((4, 8), (4, 8)), ((1, 8), (1, 8)))


def test_view_of_a_tensor_whose_strides_differ_here() -> None:
    x = torch.arange(24.0).reshape(4, 6).t()
    shapes = Shapes(((12, 4),), ((48,),), ((6, 4),), ((24,),))
    op, args, kwargs = localize(aten.view.default, (x, [48]), {}, shapes)
    assert torch.equal(op(*args, **kwargs), x.reshape(24))


@pytest.mark.parametrize(
    ("bounds", "first"), [((12, 24), 6.0), ((-12, 2**63 - 1), 6.0), ((None, 12), 0.0)]
)
def test_slice_bounds_shrink_with_the_dim(bounds: tuple[Any, Any], first: float) -> None:
    result = local(aten.slice.Tensor, (0, *bounds), ((24,), (12,)), ((12,), (6,)))
    assert result[0] == first


def test_slice_of_a_whole_dim_is_left_alone() -> None:
    result = local(aten.slice.Tensor, (1, 1, 8, 3), ((4, 8), (4, 3)), ((2, 8), (2, 3)))
    assert result[0].tolist() == [1.0, 4.0, 7.0]


def test_slice_backward() -> None:
    result = local(aten.slice_backward.default, ([24], 0, 12, 24, 1), ((12,), (24,)), ((3,), (6,)))
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]


def test_split_by_keyword_or_position() -> None:
    shapes = Shapes(((4, 12),), ((4, 6), (4, 6)), ((4, 4),), ((4, 2), (4, 2)))
    for args, kwargs in (((6, 1), {}), ((6,), {"dim": 1}), ((6, -1), {})):
        op, new_args, new_kwargs = localize(
            aten.split.Tensor, (torch.zeros(4, 4), *args), kwargs, shapes
        )
        assert [tuple(t.shape) for t in op(*new_args, **new_kwargs)] == [(4, 2), (4, 2)]


def test_repeat_counts_copies_and_not_elements() -> None:
    local(aten.repeat.default, ([2, 3],), ((4, 8), (8, 24)), ((4, 2), (8, 6)))
    local(aten.repeat.default, ([6, 1],), ((8,), (6, 8)), ((8,), (3, 8)))


def test_ops_without_sizes_keep_their_arguments() -> None:
    shapes = Shapes(((4,),), ((4,),), ((2,),), ((2,),))
    found = localize(aten.add.Tensor, ("x", "y"), {"alpha": 2}, shapes)
    assert found == (aten.add.Tensor, ("x", "y"), {"alpha": 2})
