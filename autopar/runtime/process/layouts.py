"""Which tensors a program can take: plain ones, with a place in memory for each element.

Sparse, nested, quantized and MKL-DNN tensors have no such place, and a tensor class with ops of its
own (`__torch_dispatch__`) computes results that a program does not see. Each is refused by the name
of the argument, parameter or buffer, with what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import is_under_way
from autopar.runtime.torch_private import flatten_with_paths, has_own_ops

_COMPRESSED = {
    torch.sparse_csr: "CSR", torch.sparse_csc: "CSC", torch.sparse_bsr: "BSR",
    torch.sparse_bsc: "BSC",
}  # fmt: skip
_GIVE_PARTS = (
    "pass rows, columns = {it}.coalesce().indices() and values = {it}.coalesce().values() as "
    "tensors of their own"
)


def check_arguments(
    model: nn.Module,
    leaves: Iterable[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    with_values: bool,
) -> None:
    """AutoparError, which names the argument, if programs do not take a tensor among the `leaves`
    of a call, or if it has no values though `with_values` asks for them."""

    def is_taken(x: Any) -> bool:
        if not isinstance(x, Tensor):
            return True
        has_values = not (with_values and x.is_meta)
        is_known = type(x) is Tensor or not has_own_ops(x) or is_sharded_tensor(x)
        return has_values and is_known and is_plain(x)

    if all(map(is_taken, leaves)):
        return
    for path, leaf in flatten_with_paths((args, kwargs)):
        if not is_taken(leaf):
            name = _argument(model, path)
            raise AutoparError(f"argument {name} is {_what(leaf).format(do='pass', it=name)}")


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Whether it is in shards, or the result of a collective under way: a program takes those."""
    return hasattr(tensor, "full_tensor") or is_under_way(tensor)


def check_states(model: nn.Module) -> None:
    """AutoparError, which names it, if programs do not take a parameter, a buffer or a tensor
    attribute of a module."""
    for name, kind, tensor in _states(model):
        is_known = is_sharded_tensor(tensor) or not has_own_ops(tensor)
        if not is_plain(tensor) or not is_known:
            what = _what(tensor, "keep its coalesced rows, columns and values as buffers")
            raise AutoparError(f"{kind} {name} is {what.format(do='keep', it=name)}")


def sparse_remedy(dense: str, parts: str) -> str:
    """What to write instead of a sparse tensor: `dense`, or else `parts` and a matmul with them."""
    return (
        f"Where the dense tensor fits in memory, {dense}. Else {parts}, and write the product with "
        "a dense w of f columns as "
        "torch.zeros(num_rows, f).index_add(0, rows, values[:, None] * w[columns])"
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether each element has a place in memory of its own, as programs need it."""
    is_odd = tensor.is_nested or tensor.is_quantized or any(getattr(tensor, "names", ()))
    return tensor.layout == torch.strided and not is_odd


def _states(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, module in model.named_modules():
        tables = (
            ("parameter", module._parameters), ("buffer", module._buffers),
            ("attribute", vars(module)),
        )  # fmt: skip
        yield from (
            (f"{path}.{leaf}" if path else leaf, kind, value)
            for kind, table in tables
            for leaf, value in table.items()
            if isinstance(value, Tensor)
        )


def _what(x: Tensor, parts: str = _GIVE_PARTS) -> str:
    """What `x` is, and what to do, if programs cannot take it; `{do}` and `{it}` are left open."""
    if x.is_nested:
        kind = "jagged" if x.layout == torch.jagged else "strided"
        return (
            f"a nested tensor of {kind} layout, and a program has rows of one length: {{do}} "
            "torch.nested.to_padded_tensor({it}, 0.0), with a mask of what is padding"
        )
    if x.layout in (torch.sparse_coo, *_COMPRESSED):
        kind = _COMPRESSED.get(x.layout, "COO")
        if kind != "COO":
            parts = parts.replace("{it}.coalesce", "{it}.to_sparse_coo().coalesce")
        return (
            f"a sparse {kind} tensor, whose elements have no places in memory that could be "
            f"sharded. {sparse_remedy('{do} {it}.to_dense()', parts)}"
        )
    if x.is_mkldnn:
        return "a tensor of MKL-DNN's own layout: {do} {it}.to_dense()"
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype}): {{do}} {{it}}.dequantize()"
    if any(getattr(x, "names", ())):
        return "a tensor with named dims: {do} {it}.rename(None)"
    if x.is_meta:
        return (
            "on the meta device, where tensors have no values: {do} it on the device of the model "
            "(autopar.plan takes one on meta)"
        )
    return (
        f"a {type(x).__qualname__}, a tensor class with ops of its own (__torch_dispatch__), "
        "which a program of plain tensors does not have: {do} the plain tensors that it is made "
        "of, and compute with these"
    )


def _argument(model: nn.Module, path: tuple[Any, ...]) -> str:
    """The user's name of an argument, with the path to a tensor in it: `batch['adjacency']`."""
    is_keyword, first, *rest = (step for step in path)
    where = "".join(map(str, rest))
    if str(is_keyword) == "[1]":
        return f"{first.key}{where}"
    parameters = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    known = first.idx < len(parameters)
    return f"{parameters[first.idx] if known else first.idx}{where}"
