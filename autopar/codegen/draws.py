"""What draws random numbers so that backward can draw them once more (`ir.passes.recompute`), in
ops of torch.

A state is what the draw behind it returns beside all else, so that nothing is written where the
graph has the state itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from autopar.ir.graph import Node, Phase
from autopar.ir.own_ops import DRAW
from autopar.ir.schedule import Value
from autopar.ir.sharding import Sharding
from autopar.runtime.ops.draws import drawing, redrawing


def draws_first(node: Node) -> bool:
    """Whether an op draws what nobody has drawn, and leaves the state that it draws from."""
    return node.op == DRAW and node.phase is Phase.FORWARD


def read_before(node: Node) -> range:
    """The inputs of an op that are there before it."""
    return range(len(node.inputs) - draws_first(node))


def drawn(node: Node, call: fx.Node, arguments: Sequence[fx.Node]) -> None:
    """Has `call`, of the op of torch that draws, leave the state, or draw from the one that is last
    among the `arguments`; what is no `DRAW` is left alone."""
    if draws_first(node):
        call.target = drawing(call.target)
    elif node.op == DRAW:
        call.target, call.args = redrawing(call.target), (arguments[-1], *call.args)


def positions(node: Node, source: fx.Node) -> Sequence[int] | None:
    """Where the tensors stand in the tuple that a node returns, of which `source` is the original;
    None if it returns one tensor. A state is none of them, and behind all."""
    value: Any = source.meta["val"]
    if isinstance(value, Tensor):
        return (0,) if draws_first(node) else None
    return [i for i, item in enumerate(value) if isinstance(item, Tensor)]


def state_left(
    graph: fx.Graph, node: Node, results: Sequence[fx.Node], given: Sequence[Sharding]
) -> dict[Value, fx.Node]:
    """The state that a draw leaves beside its `results`, if it leaves one, as it is `given` it."""
    if not draws_first(node):
        return {}
    state = graph.call_function(operator.getitem, (results[0].args[0], len(results)))
    return {Value(Phase.FORWARD, node.inputs[-1], given[-1]): state}
