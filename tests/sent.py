"""What a program really sends, and hands from forward to backward, seen on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plans.structure import Structure
from autopar.runtime.program.program import Program
from autopar.runtime.simulator import spmd
from tests.planned import kind_of


@dataclass(frozen=True)
class Sent:
    """A collective: its kind and mesh axis, and what rank 0 gives and gets."""

    kind: str
    axis: str
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Step:
    forward: list[Sent]
    backward: list[Sent]
    saved: list[Tensor]


def observed(
    program: Program,
    mesh: Mesh,
    graph: Graph,
    structure: Structure,
    tensors: Mapping[str, Tensor],
) -> Step:
    """The collectives of a step on `mesh` whose losses have tangent 1."""
    step = spmd.RankStep(mesh, graph, structure.only, 0.0, program.detached_shardings)
    given = step.split(program.forward_inputs, tensors)
    forward = _sent(program.forward, mesh, given)
    results = spmd.run(program.forward, mesh, step.split(program.forward_inputs, tensors))
    names = program.forward_outputs
    saved = [v for n, v in zip(names, results[0], strict=True) if n.startswith("saved:")]
    assert program.backward is not None
    inputs = backward_inputs(program, results)
    return Step(forward, _sent(program.backward, mesh, inputs), saved)


def backward_inputs(program: Program, results: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """What backward is given on each rank, where forward gave `results`, and losses tangent 1."""
    held = [dict(zip(program.forward_outputs, values, strict=True)) for values in results]
    loss = next(value for name, value in held[0].items() if name.startswith("loss:"))
    tangent = torch.ones_like(loss)
    return [
        [
            tangent if name.startswith("tangent:") else values[name]
            for name in program.backward_inputs
        ]
        for values in held
    ]


def _sent(gm: fx.GraphModule, mesh: Mesh, inputs: list[list[Tensor]]) -> list[Sent]:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copied)
    nodes = [n for n in gm.graph.nodes if kind_of(n)]
    graph.output(tuple((copied[n.all_input_nodes[0]], copied[n]) for n in nodes))
    (first, *_) = spmd.run(fx.GraphModule(gm, graph), mesh, inputs)
    return [Sent(kind_of(n), str(n.args[-1]), *pair) for n, pair in zip(nodes, first, strict=True)]


def received(collectives: Sequence[Sent], mesh: Mesh) -> int:
    """Bytes that each rank receives, over rings, but for single numbers."""
    return sum(
        received_bytes(
            each.kind,
            each.before.nbytes,
            each.after.nbytes,
            mesh.sizes[mesh.names.index(each.axis)],
        )
        for each in collectives
        if each.before.numel() > 1
    )


def received_bytes(kind: str, in_bytes: int, out_bytes: int, n: int) -> int:
    """Bytes that each of `n` ranks receives in a collective, rounded up (rings throughout)."""
    whole = max(in_bytes, out_bytes)
    if kind == "slice":
        return 0
    if kind == "permute":
        return whole if n > 1 else 0
    passes = 2 if kind == "all_reduce" else 1
    return -(-passes * (n - 1) * whole // n)
