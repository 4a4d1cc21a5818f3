"""Runs a traced joint graph on real tensors, as eager would run the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ir.graph import Role
from autopar.runtime.module.params import buffer_places
from autopar.tracer import Traced
from autopar.tracer.torch_private import tree_flatten


def run(
    traced: Traced,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Value of every output item by "role:target". A tangent that is not given is one."""
    parameters = dict(model.named_parameters())
    buffers = {name: buffer for _, _, name, buffer in buffer_places(model)}
    leaves = tree_flatten((args, kwargs))[0]
    values: list[Tensor] = []
    for name in traced.inputs:
        role, target = name.split(":")
        if role == "param":
            values.append(parameters[target].detach())
        elif role == "buffer":
            values.append(buffers[target])
        elif role == "input":
            values.append(leaves[int(target)])
        else:
            given = (tangents or {}).get(target)
            values.append(
                torch.ones((), dtype=torch.get_default_dtype()) if given is None else given
            )
    results = fx.Interpreter(traced.gm).run(*values, enable_io_processing=False)
    items = [node for node in traced.graph.nodes if node.op == "output"]
    return {
        f"{node.role.value}:{node.target}": value
        for node, value in zip(items, results, strict=True)
    }


def assert_gradients(results: dict[str, Tensor], model: nn.Module, rtol: float) -> None:
    """Every parameter's gradient, and no other, is what eager left in `.grad`."""
    names = {f"{Role.GRAD.value}:{n}" for n, p in model.named_parameters() if p.grad is not None}
    assert {key for key in results if key.startswith("grad:")} == names
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(results[f"grad:{name}"], parameter.grad, rtol)


def close(actual: Tensor, expected: Tensor, rtol: float) -> None:
    """Equal up to `rtol` of the largest magnitude."""
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=rtol * scale)
