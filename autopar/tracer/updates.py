"""Parameters that forward changes in place, hidden from autograd: by `.data`, or without gradients.

What forward reads after the change is the new value, and so does backward; the gradient of the new
value is that of the parameter. The new value is an output of the graph, `InputMutationAOTOutput`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import TraceError
from autopar.tracer import torch_private
from autopar.tracer.fx_graphs import outputs_of, replace_node, set_outputs
from autopar.tracer.remedies import Refusal

aten = torch.ops.aten


def resolve_updates(gm: fx.GraphModule) -> fx.GraphModule:
    """No tangent of a new value: nothing but the model's outputs is differentiated. And forward
    starts from the parameter, where torch starts from a copy of it."""
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, torch_private.TangentAOTInput) and _is_update(desc.output):
            _drop_tangent(gm, node)
    changed = {desc.mutated_input for desc in outputs_of(gm)[1] if _is_update(desc)}
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta["desc"] in changed:
            for copy in [user for user in node.users if user.target is aten.clone.default]:
                replace_node(copy, node)
    return gm


def _is_update(desc: Any) -> bool:
    return isinstance(desc, torch_private.InputMutationAOTOutput)


def _drop_tangent(gm: fx.GraphModule, tangent: fx.Node) -> None:
    """It is added to the gradient that comes from the outputs, or is all there is."""
    set_outputs(gm, [pair for pair in zip(*outputs_of(gm), strict=True) if pair[0] is not tangent])
    for added in list(tangent.users):
        if added.target is not aten.add.Tensor or added.kwargs or len(added.args) != 2:
            raise TraceError(f"a gradient of what forward changes in place goes into {added}")
        first, second = added.args
        replace_node(added, second if first is tangent else first)  # pyright: ignore[reportArgumentType]
    gm.graph.erase_node(tangent)


@contextmanager
def hidden_updates(model: nn.Module) -> Generator[None, None, None]:
    """TraceError if what runs inside changes a parameter of `model` in place where autograd sees
    it, which eager refuses."""
    before = {name: parameter.grad_fn for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if parameter.grad_fn is not before.get(name):
            raise TraceError(
                f"forward changes parameter {name} in place while gradients are on, which PyTorch "
                "refuses: do it under torch.no_grad()"
            )


def put_into(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, as a change in place, which a graph can show."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise Refusal(
            f"forward makes a tensor of {tensor.dtype} and shape {list(tensor.shape)} one of "
            f"{value.dtype} and shape {list(value.shape)} by setting its data",
            "use another tensor",
        )
    tensor.detach().copy_(value.detach())
