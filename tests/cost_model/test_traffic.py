"""What ops read and write: chains of pointwise ops are one kernel on a GPU, one each on a CPU."""

from __future__ import annotations

import pytest

from autopar.cluster.devices import DEVICES
from autopar.cost_model.kernel_cost import node_s, traffic
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.sharding import Sharding
from autopar.ir.uses import groups
from tests.graphs import Builder

ELEMENTS = 1 << 20


def chain() -> Graph:
    """exp(tanh(x)), and a product of it with w."""
    b = Builder({"b": ELEMENTS // 64, "h": 64, "o": 8}, params="h o")
    w = b.placeholder(Role.PARAM, "w", "h o")
    x = b.placeholder(Role.INPUT, "x", "b h")
    inner = b.op("aten.tanh.default", "m k -> m k", (x,), "b h")
    outer = b.op("aten.exp.default", "m k -> m k", (inner,), "b h")
    b.output(Role.VALUE, "y", b.op("aten.mm.default", "m k, k n -> m n", (outer, w), "b o"))
    return b.graph()


def seconds(name: str) -> list[float]:
    """Of both pointwise ops, on one device."""
    graph, device = chain(), DEVICES[name]
    done = traffic(graph, groups(graph), device)
    whole = (Sharding(()),), (Sharding(()),)
    ops = [node for node in graph.with_role(Role.OP) if node.phase is Phase.FORWARD][:2]
    return [node_s(graph, op, done[op.index], Choice(()), whole, (), device) for op in ops]


def streamed(name: str, tensors: int) -> float:
    device = DEVICES[name]
    return tensors * 4 * ELEMENTS / (device.kernels.pointwise * device.memory_bytes_per_s)


def test_a_gpu_reads_the_first_input_and_writes_the_last_output() -> None:
    inner, outer = seconds("H100")
    assert inner == pytest.approx(streamed("H100", 1), rel=1e-9)
    start_s = DEVICES["H100"].kernels.start_s
    assert outer == pytest.approx(start_s + streamed("H100", 1), rel=1e-9)


def test_a_cpu_runs_op_by_op() -> None:
    each = DEVICES["cpu"].launch_s + streamed("cpu", 2)
    assert seconds("cpu") == pytest.approx([each, each], rel=1e-9)
