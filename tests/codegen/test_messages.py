"""Messages of one tensor and of several: what arrives is what was sent."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx

from autopar.codegen.local_graph import MEMBERS, Messages
from autopar.ir.buckets import can_share
from autopar.ir.graph import Atom, Graph, Node, Phase, Ref, Role, TensorType
from autopar.ir.redistribute import Collective, layout_copies, local_shape, step
from autopar.ir.schedule import Message, Transfer, Value
from autopar.ir.sharding import P, R, Sharding
from autopar.plans.layout import Layout
from autopar.runtime.program.backend import reduce_in_place
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.simulator import spmd
from tests.codegen.meshes import mesh

WAYS = {
    "all_reduce": ("[P]", "[R]"),
    "reduce_scatter": ("[P]", "[S(0)]"),
    "all_gather": ("[S(0)]", "[R]"),
    "a gather of columns": ("[S(1)]", "[R]"),
    "a scatter of columns": ("[P]", "[S(1)]"),
}
ATOMS = (Atom(4, "a", True), Atom(6, "b", False))
KIND = TensorType("float64", (4, 6), ((0,), (1,)))
COUNT = 5


def transfers(way: str) -> tuple[Layout, list[Transfer]]:
    """Five tensors on their way."""
    nodes = tuple(
        Node(k, f"x{k}", "op", Role.OP, Phase.BACKWARD, outputs=(KIND,), key=f"x{k}")
        for k in range(COUNT)
    )
    graph = Graph("five", nodes, ATOMS)
    source, target = map(Sharding.parse, WAYS[way])
    found = step(KIND, ATOMS, source, target)
    assert found is not None
    layout = Layout(graph, mesh(2), {}, {}, {}, {}, {})
    return layout, [
        Transfer(
            f"x{k}",
            0,
            Value(Phase.BACKWARD, Ref(k), source),
            Value(Phase.BACKWARD, Ref(k), target),
            found,
            layout_copies(KIND, ATOMS, source, target, found, (2,)),
        )
        for k in range(COUNT)
    ]


def sent(way: str, sizes: list[int]) -> fx.GraphModule:
    """The graph that sends them in messages of so many each."""
    layout, moving = transfers(way)
    graph = LeanGraph()
    inputs = [graph.placeholder(f"x{k}") for k in range(COUNT)]
    messages = Messages(layout, graph, lambda transfer: transfer.key)
    results: list[fx.Node] = []
    first = 0
    for size in sizes:
        message = Message(tuple(moving[first : first + size]))
        messages.start(message, inputs[first : first + size])
        messages.wait(message)
        results += [messages.take(transfer) for transfer in message.transfers]
        first += size
    graph.output(tuple(results))
    graph.lint()
    return fx.GraphModule({}, graph)


def ran(gm: fx.GraphModule, way: str) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = local_shape(KIND, ATOMS, Sharding.parse(WAYS[way][0]), (2,))
    inputs = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(COUNT)]
        for _ in range(2)
    ]
    return spmd.run(gm, mesh(2), inputs)


@pytest.mark.parametrize("sizes", [[2, 2, 1], [5]], ids=["two", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_what_arrives_is_what_was_sent(way: str, sizes: list[int]) -> None:
    expected = ran(sent(way, [1] * COUNT), way)
    gm = sent(way, sizes)
    carried = [n.meta[MEMBERS] for n in gm.graph.nodes if MEMBERS in n.meta]
    assert carried == sizes
    for mine, theirs in zip(ran(gm, way), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_layout_is_seen(way: str) -> None:
    """The same check fails if tensors swap places in the buffer."""
    start = Messages.start
    with patch.object(Messages, "start", lambda self, m, given: start(self, m, given[::-1])):
        gm = sent(way, [5])
    assert not torch.equal(ran(gm, way)[0][0], ran(sent(way, [1] * COUNT), way)[0][0])


def test_only_a_buffer_of_its_own_is_reduced_in_place() -> None:
    for sizes, op in (([5], "all_reduce_"), ([1] * 5, "all_reduce")):
        gm = reduce_in_place(sent("all_reduce", sizes))
        assert op in {str(n.target).split(".")[1] for n in gm.graph.nodes if "." in str(n.target)}


def test_what_is_in_chunks_travels_alone() -> None:
    """Ranks hold chunks of different sizes: a bucket of them has no layout of its own."""
    total = Collective("all_reduce", 1, P, R)
    for cut, shared in (("S(0)", True), ("C(0)", False)):
        assert can_share(total, Sharding.parse(f"[{cut}, P]")) is shared
