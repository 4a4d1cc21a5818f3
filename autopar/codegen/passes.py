"""Passes over a local graph, each a function `graph -> graph`. To add one, write it and enter it in
`PASSES`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.codegen.bias import fuse_bias
from autopar.codegen.gathers import bucket_gathers
from autopar.codegen.gradients import bucket_gradients
from autopar.codegen.tidy import drop_dead_code, tidy_views
from autopar.codegen.torch_private import boxed_codegen
from autopar.runtime.program.symbols import first_rows

aten = torch.ops.aten
_Pass = Callable[[fx.Graph], fx.Graph]

MAX_IN_FLIGHT = 4
"""How many collectives whose results only leave the graph are under way: each holds its input."""

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_LAYOUT = frozenset(
    {aten.contiguous.default, aten.permute.default, aten.reshape.default, first_rows}
)


def sink_waits(graph: fx.Graph) -> fx.Graph:
    """Move each wait, with the copies that lay out what has come, to right before its first use, so
    that compute between there and the collective hides it. What only leaves the graph is waited for
    when `MAX_IN_FLIGHT` further ones have been issued."""
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    leaving: list[list[fx.Node]] = []
    for node in nodes:
        if node.target is not _WAIT:
            continue
        moved = _laid_out(node)
        first = min(moved[-1].users, key=order.__getitem__)
        if first.op == "output":
            leaving.append(moved)
            continue
        _move(moved, first)
    issued = [moved[0].all_input_nodes[0] for moved in leaving]
    output = graph.output_node()
    for k, moved in enumerate(leaving):
        later = k + MAX_IN_FLIGHT
        _move(moved, issued[later] if later < len(issued) else output)
    return graph


def _laid_out(wait: fx.Node) -> list[fx.Node]:
    """A wait and the layout ops that alone use it, in a row."""
    found = [wait]
    while len(found[-1].users) == 1:
        (user,) = found[-1].users
        if user.target not in _LAYOUT:
            break
        found.append(user)
    return found


def _move(nodes: list[fx.Node], before: fx.Node) -> None:
    for node in nodes:
        before.prepend(node)


def box(graph: fx.Graph) -> fx.Graph:
    """The code takes its inputs as one list, which it clears."""
    graph.set_codegen(boxed_codegen())
    return graph


PASSES: tuple[_Pass, ...] = (
    drop_dead_code,
    tidy_views,
    fuse_bias,
    bucket_gathers,
    bucket_gradients,
    sink_waits,
    box,
)


def apply_passes(graph: fx.Graph) -> fx.Graph:
    """`graph` after every pass, checked."""
    for step in PASSES:
        graph = step(graph)
    graph.lint()
    return graph
