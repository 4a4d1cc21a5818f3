"""Tensors that programs do not take are refused by name, with a remedy that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.runtime.torch_private import wrapper_of
from tests.runtime import layout_workers as workers
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta", "ignore:The PyTorch API of", "ignore:.*quantize_"
)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_taken_equals_eager_and_the_rest_is_named(world_size: int) -> None:
    ranks: list[Any] = (
        [workers.take_and_refuse()]
        if world_size == 1
        else spawn("tests.runtime.layout_workers.take_and_refuse", world_size)
    )
    for found in ranks:
        for name, (_, words) in workers.REFUSED.items():
            assert found[name].startswith("argument adjacency is ") and words in found[name]
        for name in (*workers.TAKEN, "parts", "dense"):
            assert found[name] < 1e-12, name


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: (({"pair": [1, x.to_sparse()]},), {}), "argument x['pair'][1] is a sparse COO"),
        (lambda x: ((), {"x": (x.to_sparse(),)}), "argument x[0] is a sparse COO"),
        (lambda x: ((x, x.to_sparse_csr()), {}), "argument 1 is a sparse CSR"),
        (
            lambda x: ((torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),), {}),
            "argument x is a quantized tensor (torch.qint8): pass x.dequantize()",
        ),
    ],
)
def test_an_argument_is_called_as_the_user_calls_it(
    make: Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]], name: str
) -> None:
    args, kwargs = make(torch.eye(2))

    class Takes(nn.Linear):
        def forward(self, x: Any, *rest: Any) -> Tensor:
            return self.weight.sum()

    for call in (autopar.compile(Takes(2, 2)), lambda *a, **k: autopar.plan(Takes(2, 2), k or a)):
        with pytest.raises(AutoparError) as told:
            call(*args, **kwargs)
        assert name in str(told.value)


class Holds(nn.Module):
    def __init__(self, kind: str, value: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if kind == "buffer":
            self.layer.register_buffer("table", value)
        else:
            self.layer.table = nn.Parameter(value) if kind == "parameter" else value

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ self.layer.table).square().mean()


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_state_is_named(kind: str, to: str) -> None:
    model = Holds(kind, getattr(torch.eye(4), to)())
    for call in (autopar.compile, lambda m: autopar.plan(m, torch.randn(2, 4))):
        with pytest.raises(AutoparError, match=rf"{kind} layer.table is a sparse (COO|CSR)"):
            call(model)
    autopar.compile(Holds(kind, model.layer.table.detach().to_dense()))(torch.randn(2, 4))


class Packed(Tensor):
    """Holds int8 and a scale, and computes with their product, as quantized weights do."""

    packed: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Packed:
        made = wrapper_of(cls, torch.empty(packed.shape, device="meta"), packed.device)
        made.packed, made.scale = packed, scale
        return made

    def __init__(self, *_: Tensor) -> None:
        """All is done where it is made."""

    def unpacked(self) -> Tensor:
        return self.packed * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].packed, args[0].scale)
        plain = [x.unpacked() if isinstance(x, Packed) else x for x in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_state_of_a_class_with_ops_of_its_own_is_named(kind: str) -> None:
    """Rank 0's values did not arrive on other ranks, and int8 became floats."""
    value = Packed(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))
    if kind == "parameter":
        value = nn.Parameter(value, requires_grad=False)
    model = Holds("attribute", value)
    if kind == "buffer":
        del model.layer.table
        model.layer.register_buffer("table", value)
    model(torch.randn(2, 4))
    for call in (autopar.compile, lambda m: autopar.plan(m, torch.randn(2, 4))):
        with pytest.raises(AutoparError, match=rf"{kind} layer.table is a Packed, .*: keep the"):
            call(model)


@pytest.mark.parametrize("make", [torch.sparse_coo_tensor, torch.sparse_csr_tensor])
def test_a_sparse_tensor_within_forward_is_refused(make: Callable[..., Tensor]) -> None:
    """Though a COO tensor can be captured: with stand-ins that have none of its values."""

    class Makes(nn.Linear):
        def forward(self, i: Tensor, j: Tensor, v: Tensor) -> Tensor:
            where = (torch.stack([i, j]),) if make is torch.sparse_coo_tensor else (i, j)
            return torch.sparse.mm(make(*where, v, (4, 4)), self.weight).square().mean()

    indices = (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 0, 3, 2]))
    i = indices[0] if make is torch.sparse_csr_tensor else torch.arange(4)
    with pytest.raises(TraceError, match=r"no sparse tensors\. Where the dense tensor fits"):
        autopar.compile(Makes(4, 4, bias=False))(i, indices[1], torch.ones(4))
