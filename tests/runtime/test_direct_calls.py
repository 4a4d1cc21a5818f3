"""Ops that are called directly are the ops that they stand for."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
from torch import fx

import autopar.runtime.ops.attention
import autopar.runtime.ops.host_copies  # noqa: F401 defines the op
from autopar.runtime.ops.draws import drawing
from autopar.runtime.ops.operators import function_of
from autopar.runtime.program.backend import DIRECT, call_directly
from autopar.runtime.torch_private import TorchDispatchMode

_ATEN = torch.ops.aten
X, Y = (torch.arange(1.0, 7.0).reshape(2, 3) * k for k in (1, 2))
CALLS = {
    _ATEN.add.Tensor: [((X, Y), {"alpha": 3}), ((X, 2.5), {}), ((X.long(), 1), {})],
    _ATEN.add_.Tensor: [((X.clone(), Y), {})],
    _ATEN.addmm.default: [((Y[0, :2], X, Y.T), {}), ((Y[0, :2], X, Y.T), {"beta": 2, "alpha": 3})],
    _ATEN.bmm.default: [((X[None], Y.T[None]), {})],
    _ATEN.cat.default: [(([X, Y],), {}), (([X, Y], 1), {})],
    _ATEN.clone.default: [((X.T,), {"memory_format": torch.contiguous_format})],
    _ATEN.div.Tensor: [((X.long(), Y), {}), ((X, 3), {})],
    _ATEN.expand.default: [((X[:1], [4, 3]), {}), ((X[:1], [4, -1]), {})],
    _ATEN.mean.dim: [((X, [-1], True), {}), ((X, [0]), {"dtype": torch.float64}), ((X, None), {})],
    _ATEN.mm.default: [((X, Y.T), {})],
    _ATEN.mul.Tensor: [((X, Y.long()), {}), ((X.half(), 0.5), {})],
    _ATEN.permute.default: [((X, [1, 0]), {})],
    _ATEN.pow.Tensor_Scalar: [((X, 2), {}), ((X, 0.5), {})],
    _ATEN.reshape.default: [((X.T, [6]), {}), ((X, [3, -1]), {})],
    _ATEN.squeeze.dim: [((X[:1], 0), {})],
    _ATEN.sub.Tensor: [((X, Y), {"alpha": 2}), ((X, 1), {})],
    _ATEN.sum.dim_IntList: [
        ((X, [0], True), {}),
        ((X.half(), [0]), {"dtype": torch.float32}),
        ((X, []), {}),
        ((X, None, True), {}),
    ],
    _ATEN.transpose.int: [((X, 0, 1), {})],
    _ATEN.unsqueeze.default: [((X, -1), {})],
    _ATEN.view.default: [((X, [3, 2]), {})],
}
"""What overloads are called with; those of one tensor alone, with that."""


class _Noted(TorchDispatchMode):
    """Notes what comes to the dispatcher, with everything that is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, repr(args), repr(kwargs or {})))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_the_dispatcher_gets_the_same_call(op: Any) -> None:
    for args, kwargs in CALLS.get(op, [((X,), {})]):
        found = []
        for function in (op, DIRECT[op]):
            given = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            with torch.no_grad(), _Noted() as noted:
                result = function(*given, **kwargs)
            found.append((noted.calls, result.dtype, result.stride(), result.tolist()))
        assert found[0] == found[1]
        assert found[0][0]


def test_ops_of_autopar_are_functions() -> None:
    op, q = torch.ops.autopar.sdpa.default, torch.randn(2, 4, 8, 16)
    function = function_of(op)
    assert function is not None
    for one, other in zip(op(q, q, q, None, True, None), function(q, q, q, None, True, None),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)
    assert isinstance(function, FunctionType)


def test_other_ops_are_left() -> None:
    drawing_op = drawing(_ATEN.native_dropout.default)
    landed = torch.ops.autopar.landed.default
    for op in (_ATEN.mm.default, _ATEN.bernoulli.p, landed, drawing_op, len):
        assert function_of(op) is None


def test_a_graph_computes_the_same() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = _ATEN.mm.default(x, _ATEN.t.default(x))
        return _ATEN.silu.default(_ATEN.add_.Tensor(made, 1.0))

    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(_ATEN.mm.default, (x, graph.call_function(_ATEN.t.default, (x,))))
    made = graph.call_function(_ATEN.add_.Tensor, (made, 1.0))
    graph.output(graph.call_function(_ATEN.silu.default, (made,)))
    gm = call_directly(fx.GraphModule(torch.nn.Module(), graph))
    assert torch.equal(gm(X), step(X))
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [torch.t, torch.mm, torch.Tensor.add_, _ATEN.silu.default]
