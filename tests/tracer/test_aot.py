"""What the tracer relies on in torch's private APIs; holds for torch 2.11 and 2.13."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import torch.compiler
from torch import nn

from autopar.tracer import torch_private


def test_signature_of_the_joint_export() -> None:
    parameters = inspect.signature(torch_private.aot_export_joint_with_descriptors).parameters
    assert list(parameters)[:4] == ["stack", "mod", "args", "kwargs"]
    assert "decompositions" in parameters


@pytest.mark.parametrize(
    ("descriptor", "field"),
    [
        (torch_private.ParamAOTInput, "target"),
        (torch_private.BufferAOTInput, "target"),
        (torch_private.PlainAOTInput, "idx"),
        (torch_private.TangentAOTInput, "output"),
        (torch_private.PlainAOTOutput, "idx"),
        (torch_private.GradAOTOutput, "grad_of"),
        (torch_private.InputMutationAOTOutput, "mutated_input"),
    ],
)
def test_fields_of_descriptors(descriptor: type, field: str) -> None:
    assert field in {f.name for f in dataclasses.fields(descriptor)}
    assert callable(descriptor.expr)


def test_batch_norms_have_one_forward() -> None:
    for kind in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d):
        assert kind.__base__ is torch_private.AnyBatchNorm
        assert kind.forward is torch_private.AnyBatchNorm.forward


def test_compiling_is_on_inside_and_restored_after_an_error() -> None:
    assert not torch.compiler.is_compiling()
    with pytest.raises(KeyError), torch_private.compiling():
        assert torch.compiler.is_compiling()
        raise KeyError
    assert not torch.compiler.is_compiling()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch_private.annotate({"mark": "here"}):
            self.steps += 1
            return ((x * self.weight).sum(),)


def test_a_joint_graph_has_descriptors_tags_and_labels() -> None:
    mode, module = torch_private.FakeTensorMode(), Scale()
    with mode:
        module._parameters["weight"] = nn.Parameter(torch.empty(3))
        module._buffers["steps"] = torch.empty(3)
        x = torch.empty(3)
    graph = torch_private.joint_graph(module, (x,), mode, as_compiled=True).graph
    kinds = [type(n.meta["desc"]) for n in graph.find_nodes(op="placeholder")]
    assert kinds == [
        torch_private.ParamAOTInput,
        torch_private.BufferAOTInput,
        torch_private.PlainAOTInput,
        torch_private.TangentAOTInput,
    ]
    outputs = {type(d) for d in graph.output_node().meta["desc"] if d is not None}
    assert outputs == {
        torch_private.PlainAOTOutput,
        torch_private.GradAOTOutput,
        torch_private.InputMutationAOTOutput,
    }
    ops = [n for n in graph.nodes if n.op == "call_function"]
    assert {n.meta["partitioner_tag"] for n in ops} == {"is_forward", "is_backward"}
    assert all(n.meta["custom"] == {"mark": "here"} for n in ops)
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in ops)


def test_decompositions_are_of_ops_into_others() -> None:
    assert torch_private.decomposition(torch.ops.aten.mm.default) is None
    silu = torch_private.decomposition(torch.ops.aten.silu_backward.default)
    assert silu is not None
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    expected = torch.ops.aten.silu_backward.default(x.cos(), x)
    torch.testing.assert_close(silu(x.cos(), x), expected, rtol=1e-12, atol=1e-12)


def test_ops_of_a_function_on_fakes_are_a_graph_with_values() -> None:
    with torch_private.FakeTensorMode():
        x = torch.empty(2, 3)
    gm = torch_private.ops_of(lambda x: (x.exp(), None), [x])
    assert gm is not None
    (op,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert op.target is torch.ops.aten.exp.default and op.meta["val"].shape == (2, 3)
    assert gm.graph.output_node().args[0] == (op, None)
    assert torch_private.ops_of(lambda _: NotImplemented, [x]) is None


def test_a_plain_tensor_stands_for_itself_and_is_computed_without_modes() -> None:
    plain = torch.zeros(2)
    assert torch_private.functionless(plain) is plain
    with torch_private.FakeTensorMode(), torch_private.no_modes():
        assert (plain + 1).tolist() == [1.0, 1.0]
