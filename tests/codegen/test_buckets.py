"""Buckets: which tensors travel together, when, and that what arrives is what was sent."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import fx

from autopar.codegen import bucketing, gradients
from autopar.codegen.bias import BIAS, fuse_bias
from autopar.codegen.bucketing import MEMBERS, Bucket
from autopar.codegen.collectives import SENT, Sent
from autopar.codegen.gathers import bucket_gathers
from autopar.codegen.gradients import bucket_gradients
from autopar.codegen.tidy import tidy_views
from autopar.ir.buckets import can_share
from autopar.ir.redistribute import Collective
from autopar.ir.sharding import P, R, Sharding
from autopar.runtime.program.backend import reduce_in_place
from autopar.runtime.simulator import spmd
from tests.codegen.meshes import mesh

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

EXTRA = {
    c10d.all_reduce.default: ("sum",),
    c10d.reduce_scatter_tensor.default: ("sum", 2),
    c10d.all_gather_into_tensor.default: (2,),
}


def collective(
    graph: fx.Graph, target, x: fx.Node, *, axis: str = "ax0", dtype: str = "float64",
    shape: tuple[int, ...] = (4, 3), leaves: bool = True,
) -> fx.Node:  # fmt: skip
    """The awaited result of a collective that may share a bucket."""
    issued = graph.call_function(target, (x, *EXTRA[target], axis))
    issued.meta[SENT] = Sent(shape, dtype, 8 * shape[0] * shape[1], leaves)
    return graph.call_function(c10d.wait_tensor.default, (issued,))


def sent(gm: fx.GraphModule) -> list[tuple[str, int]]:
    """(axis, tensors carried) of every collective, in order."""
    return [
        (n.args[-1], n.meta.get(MEMBERS, 1))
        for n in gm.graph.nodes
        if n.target in EXTRA
    ]  # fmt: skip


def names(gm: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function"]


def many(target, *, leaves: bool, count: int = 5) -> fx.Graph:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(count)]
    results = [collective(graph, target, x, leaves=leaves) for x in inputs]
    graph.output(tuple(graph.call_function(aten.neg.default, (r,)) for r in results))
    return graph


def run(gm: fx.GraphModule, count: int = 5) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
        for _ in range(2)
    ]
    return spmd.run(gm, mesh(2), inputs)


CASES = [
    (c10d.all_reduce.default, bucket_gradients, True),
    (c10d.reduce_scatter_tensor.default, bucket_gradients, True),
    (c10d.all_gather_into_tensor.default, bucket_gradients, True),
    (c10d.all_gather_into_tensor.default, bucket_gathers, False),
]


@pytest.mark.parametrize("limit", [1, 200, 1 << 20], ids=["alone", "two", "all"])
@pytest.mark.parametrize(("target", "bucketed", "leaves"), CASES)
def test_what_arrives_is_what_was_sent(target, bucketed, leaves: bool, limit: int) -> None:
    expected = run(fx.GraphModule({}, many(target, leaves=leaves)))
    with patch.object(bucketing, "BUCKET_BYTES", limit):
        gm = fx.GraphModule({}, bucketed(many(target, leaves=leaves)))
    gm.graph.lint()
    assert [members for _, members in sent(gm)] == {1: [1] * 5, 200: [2, 2, 1]}.get(limit, [5])
    for mine, theirs in zip(run(gm), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("target", "bucketed", "leaves"), CASES)
def test_a_wrong_layout_is_seen(target, bucketed, leaves: bool) -> None:
    """The same check fails if members swap places in the buffer."""
    issue = Bucket.issue
    with patch.object(Bucket, "issue", lambda self, g, inputs: issue(self, g, inputs[::-1])):
        gm = fx.GraphModule({}, bucketed(many(target, leaves=leaves)))
    expected = run(fx.GraphModule({}, many(target, leaves=leaves)))
    assert not torch.equal(run(gm)[0][0], expected[0][0])


def test_buckets_are_of_one_kind_axis_and_dtype() -> None:
    graph = fx.Graph()
    kinds = [("ax0", "float64"), ("ax1", "float64"), ("ax0", "float32"), ("ax0", "float64")]
    results = []
    for k, (axis, dtype) in enumerate(kinds):
        x = graph.placeholder(f"x{k}")
        results.append(collective(graph, c10d.all_reduce.default, x, axis=axis, dtype=dtype))
    x = graph.placeholder("x")
    results.append(collective(graph, c10d.reduce_scatter_tensor.default, x))
    graph.output(tuple(results))
    gm = fx.GraphModule({}, bucket_gradients(graph))
    assert sorted(sent(gm)) == [("ax0", 1), ("ax0", 1), ("ax0", 2), ("ax1", 1)]


def test_a_full_bucket_is_sent_before_the_rest_is_computed_and_awaited_later() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = []
    for _ in range(gradients.MAX_UNDER_WAY + 2):
        x = graph.call_function(aten.neg.default, (x,))
        results.append(collective(graph, c10d.all_reduce.default, x))
    graph.output(tuple(results))
    with patch.object(bucketing, "BUCKET_BYTES", 1):
        order = names(fx.GraphModule({}, bucket_gradients(graph)))
    issued = [i for i, name in enumerate(order) if name == "all_reduce"]
    awaited = [i for i, name in enumerate(order) if name == "wait_tensor"]
    assert order[:4] == ["neg", "all_reduce", "neg", "all_reduce"]
    for k, at in enumerate(awaited):
        later = k + gradients.MAX_UNDER_WAY
        assert at > issued[min(later, len(issued) - 1)]
    under_way = [sum(i <= at for i in issued) - sum(w < at for w in awaited) for at in issued]
    assert max(under_way) == gradients.MAX_UNDER_WAY + 1


def test_a_gradient_reduced_over_two_axes_goes_in_two_buckets() -> None:
    graph = fx.Graph()
    results = []
    for k in range(3):
        first = collective(graph, c10d.all_reduce.default, graph.placeholder(f"x{k}"))
        results.append(collective(graph, c10d.all_reduce.default, first, axis="ax1"))
    graph.output(tuple(results))
    gm = fx.GraphModule({}, bucket_gradients(graph))
    assert sent(gm) == [("ax0", 3), ("ax1", 3)]


def test_the_next_gather_is_under_way_while_the_one_before_is_used() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{k}") for k in range(3)]
    y = None
    for x in inputs:
        whole = collective(graph, c10d.all_gather_into_tensor.default, x, leaves=False)
        y = whole if y is None else graph.call_function(aten.mul.Tensor, (y, whole))
    graph.output((y,))
    with patch.object(bucketing, "BUCKET_BYTES", 1):
        order = names(fx.GraphModule({}, bucket_gathers(graph)))
    gather, wait = "all_gather_into_tensor", "wait_tensor"
    assert order == [gather, gather, wait, gather, wait, "mul", wait, "mul"]


def test_gathers_over_two_axes_wait_for_one_another() -> None:
    graph = fx.Graph()
    results = []
    for k in range(2):
        x = graph.placeholder(f"x{k}")
        gather = c10d.all_gather_into_tensor.default
        half = collective(graph, gather, x, leaves=False)
        results.append(collective(graph, gather, half, axis="ax1", shape=(8, 3), leaves=False))
    graph.output(tuple(results))
    gm = fx.GraphModule({}, bucket_gathers(graph))
    gm.graph.lint()
    assert sent(gm) == [("ax0", 2), ("ax1", 2)]


def test_a_bias_goes_back_into_its_matmul() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    total = graph.call_function(
        aten.add.Tensor, (graph.call_function(aten.mm.default, (a, b)), c)
    )  # fmt: skip
    total.meta[BIAS] = True
    graph.output((total,))
    gm = fx.GraphModule({}, fuse_bias(graph))
    assert names(gm) == ["addmm"]
    gm.recompile()
    x, w, bias = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(gm(x, w, bias)[0], x @ w + bias)


def test_views_that_undo_one_another_go() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.detach.default, (x,))
    y = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (y,)),))
    y = graph.call_function(aten.reshape.default, (y, [6]))
    y = graph.call_function(aten.reshape.default, (y, [3, 2]))
    graph.output((graph.call_function(aten.neg.default, (y,)),))
    assert names(fx.GraphModule({}, tidy_views(graph))) == ["reshape", "neg"]


def test_only_a_buffer_of_its_own_is_reduced_in_place() -> None:
    for count, op in ((5, "all_reduce_"), (1, "all_reduce")):
        graph = bucket_gradients(many(c10d.all_reduce.default, leaves=True, count=count))
        assert op in names(reduce_in_place(fx.GraphModule({}, graph)))


def test_what_is_in_chunks_travels_alone() -> None:
    """Ranks hold chunks of different sizes: a bucket of them has no layout of its own."""
    total = Collective("all_reduce", 1, P, R)
    for cut, shared in (("S(0)", True), ("C(0)", False)):
        assert can_share(total, Sharding.parse(f"[{cut}, P]")) is shared
