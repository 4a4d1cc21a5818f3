"""The snapshot is the FX graph's twin, and its phases are consistent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from autopar.ir.graph import Phase, Ref, Role
from autopar.tracer.capture import capture, only_losses
from autopar.tracer.normalize import normalize
from autopar.tracer.snapshot import snapshot
from autopar.tracer.watch import Watch
from tests.tracer.models import gpt2, llama, token_inputs

BUILDS = pytest.mark.parametrize("build", [gpt2, llama])


@BUILDS
def test_nodes_are_those_of_the_fx_graph_then_its_outputs(build: Callable[[], nn.Module]) -> None:
    model = build()
    found = capture(model, (), token_inputs(), only_losses, Watch(model))
    normalize(found.gm, found.tied)
    graph = snapshot(found, "model")
    *fx_nodes, output = found.gm.graph.nodes
    assert [n.name for n in graph.nodes[: len(fx_nodes)]] == [n.name for n in fx_nodes]
    returned = [n.inputs[0] for n in graph.nodes[len(fx_nodes) :]]
    assert returned == [Ref(fx_nodes.index(item)) for item in output.args[0]]
    for node, fx_node in zip(graph.nodes, fx_nodes, strict=False):
        if node.op != "getitem":
            assert {r.node for r in node.inputs} == {
                fx_nodes.index(i) for i in fx_node.all_input_nodes
            }


@BUILDS
def test_forward_depends_on_forward_alone(build: Callable[[], nn.Module]) -> None:
    model = build()
    found = capture(model, (), token_inputs(), only_losses, Watch(model))
    normalize(found.gm, found.tied)
    tagged = snapshot(found, "model")
    for node in tagged.nodes:
        if node.phase is Phase.FORWARD:
            assert all(tagged.nodes[r.node].phase is Phase.FORWARD for r in node.inputs)
    assert {n.phase for n in tagged.with_role(Role.GRAD, Role.TANGENT)} == {Phase.BACKWARD}
    assert {n.phase for n in tagged.with_role(Role.LOSS, Role.DETACHED)} == {Phase.FORWARD}

    depends = {n.index for n in tagged.with_role(Role.TANGENT)}
    for node in tagged.nodes:
        if any(r.node in depends for r in node.inputs):
            depends.add(node.index)
    for index, fx_node in enumerate(found.gm.graph.nodes):
        if index in depends and fx_node.op == "call_function":
            del fx_node.meta["partitioner_tag"]
    untagged = snapshot(found, "model")
    assert [n.phase for n in untagged.nodes] == [n.phase for n in tagged.nodes]


@BUILDS
def test_every_op_of_a_block_is_in_its_module(build: Callable[[], nn.Module]) -> None:
    model = build()
    found = capture(model, (), token_inputs(), only_losses, Watch(model))
    normalize(found.gm, found.tied)
    graph = snapshot(found, "model")
    modules = {name for name, _ in model.named_modules()}
    assert {n.module for n in graph.nodes} <= modules
    prefix = "transformer.h" if build is gpt2 else "model.layers"
    counts = [
        sum(n.role is Role.OP and n.module.startswith(f"{prefix}.{layer}") for n in graph.nodes)
        for layer in (0, 1)
    ]
    assert counts[0] == counts[1] > 100
