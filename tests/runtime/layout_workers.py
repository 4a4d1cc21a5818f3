"""Inputs of kinds that programs take, or refuse, on one rank or several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

REFUSED = {
    "COO": (lambda x: x.to_sparse(), "sparse COO tensor"),
    "CSR": (lambda x: x.to_sparse_csr(), "sparse CSR tensor"),
    "CSC": (lambda x: x.to_sparse_csc(), "sparse CSC tensor"),
    "BSR": (lambda x: x.to_sparse_bsr((2, 2)), "sparse BSR tensor"),
    "BSC": (lambda x: x.to_sparse_bsc((2, 2)), "sparse BSC tensor"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[:2], x[:3]], layout=torch.jagged),
        "nested tensor of jagged layout",
    ),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "MKL-DNN"),
    "meta": (lambda x: x.to("meta"), "on the meta device"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), "a MaskedTensor"),
}
"""How each kind is made, and what the error says of it."""

TAKEN = {
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "imag": lambda x: torch.complex(x, x + 1).conj().imag,
}


class Product(nn.Module):
    """`adjacency @ w`, with the rows, columns and values of a sparse one where they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def forward(self, adjacency: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        w = self.w
        if not isinstance(adjacency, Tensor):
            (rows, columns), values = adjacency
            zeros = torch.zeros(8, 4, dtype=w.dtype)
            return zeros.index_add(0, rows, values[:, None] * w[columns]).square().mean()
        if adjacency.is_complex():
            return (adjacency @ w.to(adjacency.dtype)).imag.square().mean()
        return (adjacency @ w).square().mean()


def matrix() -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    return torch.where(x > 0.5, x, 0.0)


def as_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """What errors say to pass instead of a sparse tensor."""
    x = x.to_sparse_coo().coalesce()
    return x.indices(), x.values()


def off(made: object) -> float:
    """By how much loss and gradient differ from eager's."""
    eager, model = Product(), autopar.compile(Product())
    expected, loss = eager(made), model(made)
    expected.backward()
    loss.backward()
    grad = model.w.grad
    assert grad is not None and eager.w.grad is not None
    whole = grad if type(grad) is Tensor else grad.full_tensor()
    return max(float((expected - loss).detach().abs()), float((whole - eager.w.grad).abs().max()))


def take_and_refuse() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (make, _) in REFUSED.items():
        try:
            autopar.compile(Product())(make(matrix()))
        except AutoparError as error:
            found[name] = str(error)
    for name, make in TAKEN.items():
        found[name] = off(make(matrix()))
    found["parts"] = off(as_parts(matrix().to_sparse_csr()))
    found["dense"] = off(matrix().to_sparse_bsr((2, 2)).to_dense())
    return found
