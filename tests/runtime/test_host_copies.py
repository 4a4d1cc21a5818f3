"""The ops that copy tensors to the host and back, where the host's memory is the device's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from autopar.codegen.torch_private import boxed_codegen
from autopar.runtime.ops import host_copies
from autopar.runtime.ops.host_copies import ARRIVED, OFFLOAD, RELOAD
from autopar.runtime.program.backend import prepare

CPU = torch.device("cpu")


def strided() -> Tensor:
    return torch.randn(3, 4, 5).permute(2, 0, 1)


def test_what_comes_back_is_what_went() -> None:
    x = strided()
    away = OFFLOAD(x)
    ARRIVED(away)
    expected = x.clone()
    x.zero_()
    back = RELOAD(away, CPU)
    ARRIVED(back)
    away.zero_()
    assert torch.equal(back, expected) and back.stride() == expected.stride()


def test_fake_tensors_are_like_real_ones() -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(host_copies.offload.op, (strided(),), test_utils=checks)
    torch.library.opcheck(host_copies.reload.op, (strided(), CPU), test_utils=checks)
    torch.library.opcheck(host_copies.arrived.op, (strided(),), test_utils=checks)


def step() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.sin.default, (x,))
    away = graph.call_function(OFFLOAD, (made,))
    more = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.call_function(ARRIVED, (away,))
    back = graph.call_function(RELOAD, (away, CPU))
    graph.call_function(ARRIVED, (back,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (back, more)), away))
    graph.set_codegen(boxed_codegen())
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_graphs_with_them_run(backend: str) -> None:
    x = torch.randn(64, 64)
    run = prepare(step(), backend)
    for _ in range(2):
        found, away = run([x])
        torch.testing.assert_close(found, x.sin() * x.cos())
        torch.testing.assert_close(away, x.sin())
