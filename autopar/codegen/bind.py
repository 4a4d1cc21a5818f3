"""Binds the graphs that all ranks share to one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.codegen.collectives import SENDS
from autopar.codegen.torch_private import boxed_codegen
from autopar.errors import PlanMismatchError
from autopar.ir.mesh import Mesh
from autopar.runtime.ops.ragged_all_to_all import RAGGED_OPS
from autopar.runtime.process.stack_lines import AXIS
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.program import Program
from autopar.runtime.program.symbols import SYMBOLS, on_rank


def bind(
    program: Program,
    groups: Mapping[str, str],
    mesh: Mesh,
    coordinate: Sequence[int],
    device: torch.device | None = None,
) -> Program:
    """`program` for the rank at `coordinate` of `mesh`. `groups` names its process group on each
    axis. Graphs are traced on the CPU: tensors that they create there are created on `device`.

    The given program is not changed. PlanMismatchError for an axis without a group.
    """
    index = {axis.name: at for axis, at in zip(mesh, coordinate, strict=True)}
    missing = [name for name in index if name not in groups]
    if missing:
        raise PlanMismatchError(f"there is no process group for mesh axis {missing[0]!r}")

    def bound(gm: fx.GraphModule) -> fx.GraphModule:
        return _bound(gm, groups, index, device)

    before = program.before
    return replace(
        program,
        forward=bound(program.forward),
        backward=None if program.backward is None else bound(program.backward),
        weights=None if program.weights is None else bound(program.weights),
        before=None if before is None else bind(before, groups, mesh, coordinate, device),
    )


def _bound(
    gm: fx.GraphModule,
    groups: Mapping[str, str],
    index: Mapping[str, int],
    device: torch.device | None,
) -> fx.GraphModule:
    graph = LeanGraph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(boxed_codegen())
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in SYMBOLS:
            x, *behind = node.args
            node.target, args = on_rank(node.target, behind, index)
            node.args = (x, *args)
        if node.target in SENDS or node.target in RAGGED_OPS:
            node.meta[AXIS] = axis = node.args[-1]
            node.args = (*node.args[:-1], groups[axis])
        elif device is not None and device.type != "cpu":
            node.args, node.kwargs = _on(node.args, device), _on(node.kwargs, device)
    graph.lint()
    module = fx.GraphModule(gm, graph)
    return module if device is None else module.to(device)


def _on(value: Any, device: torch.device) -> Any:
    """`value` with `device` for the CPU."""
    return map_aggregate(
        value, lambda v: device if isinstance(v, torch.device) and v.type == "cpu" else v
    )
