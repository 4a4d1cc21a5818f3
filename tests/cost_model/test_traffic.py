"""What ops read and write: chains of pointwise ops are one kernel on a GPU, one each on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster.devices import DEVICES
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.kernel_cost import node_s, traffic
from autopar.cost_model.price import price
from autopar.errors import AutoparError
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.sharding import Sharding
from autopar.plans.decisions import make_stage
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.solver import solve
from tests.graphs import Builder
from tests.planned import on_h100

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


def seconds(name: str, backend: str = "") -> list[float]:
    """Of both pointwise ops, on one device."""
    graph, device = chain(), DEVICES[name]
    done = traffic(graph, fused=Options(PlanOptions(backend=backend)).fuses(device))
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


def test_eager_runs_op_by_op_on_a_gpu_too() -> None:
    each = DEVICES["H100"].kernels.start_s + streamed("H100", 2)
    assert seconds("H100", "eager") == pytest.approx([each, each], rel=1e-9)
    assert sum(seconds("H100", "inductor")) == sum(seconds("H100"))
    assert sum(seconds("cpu", "inductor")) < sum(seconds("cpu"))


def test_a_cpu_runs_op_by_op() -> None:
    each = DEVICES["cpu"].launch_s + streamed("cpu", 2)
    assert seconds("cpu") == pytest.approx([each, each], rel=1e-9)


def viewed() -> Graph:
    """Two products, of x and of its exponentials, with the transpose of w; and the transpose of the
    second, which is returned."""
    b = Builder({"b": 64, "h": 32, "o": 16}, params="h o")
    w = b.placeholder(Role.PARAM, "w", "o h")
    x = b.placeholder(Role.INPUT, "x", "b h")
    turned = b.op("aten.t.default", "n k -> k n", (w,), "h o")
    first = b.op("aten.mm.default", "m k, k n -> m n", (x, turned), "b o")
    other = b.op("aten.exp.default", "m k -> m k", (x,), "b h")
    second = b.op("aten.mm.default", "m k, k n -> m n", (other, turned), "b o")
    b.output(Role.VALUE, "y", first)
    b.output(Role.VALUE, "z", b.op("aten.t.default", "m n -> n m", (second,), "o b"))
    for place, node in enumerate(b.nodes):
        if node.op == "aten.t.default":
            b.nodes[place] = replace(node, view=True)
    return b.graph()


@pytest.mark.parametrize(("name", "backend"), [("cpu", ""), ("cpu", "inductor"), ("H100", "eager")])
def test_a_view_counts_once_where_a_cpu_runs_op_by_op(name: str, backend: str) -> None:
    graph, device = viewed(), DEVICES[name]
    fused = Options(PlanOptions(backend=backend)).fuses(device)
    whole = (Sharding(()),) * 2, (Sharding(()),)
    first, second = (
        node_s(graph, node, work, Choice(()), whole, (), device)
        for node in graph.with_role(Role.OP)
        if node.op == "aten.mm.default"
        for work in [traffic(graph, fused=fused)[node.index]]
    )
    expected = device.launch_s if (name, fused) == ("cpu", False) else 0.0
    assert first - second == pytest.approx(expected, abs=1e-12)


def test_a_plan_is_priced_for_the_backend_that_it_is_asked_for_and_says_so() -> None:
    cluster, mesh = on_h100("4")
    found: list[int] = []
    for backend in ("inductor", "eager"):
        options = make_options(mesh="4", backend=backend)
        asked = make_graph_request(chain(), cluster, options)
        problem = price(asked.on(mesh))
        estimates = cost_breakdown(
            asked.on(mesh), make_stage(asked.on(mesh), problem, solve(problem))
        ).estimates
        assert asked.on(mesh).describe_imposed() == (f"backend {backend}",)
        found.append(estimates.compute_ns)
    assert found[0] < found[1]
    assert make_graph_request(chain(), cluster, Options()).on(mesh).describe_imposed() == ()
    with pytest.raises(AutoparError, match="no backend 'jit': choose one of eager, inductor"):
        make_options(mesh="4", backend="jit")
