"""The pass that drops views which undo or repeat one another: each costs an interpreted graph as
much as a small kernel."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default})
_SWAPS = frozenset({aten.t.default, aten.transpose.int})


def tidy_views(graph: fx.Graph) -> fx.Graph:
    """Read through what passes a tensor on as it is, through a reshape that is reshaped again, and
    through a transposition that is undone."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        while node.target is aten.reshape.default and node.args[0].target is aten.reshape.default:
            node.args = (node.args[0].args[0], *node.args[1:])
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same, delete_user_cb=lambda user: user.op != "output")
    return drop_dead_code(graph)


def drop_dead_code(graph: fx.Graph) -> fx.Graph:
    """Drop every op whose result is not used; inputs stay. So do collectives go: none of the ranks
    uses theirs (an op may take an argument only to know that it is there)."""
    for node in reversed(graph.nodes):
        is_collective = str(node.target).startswith("_c10d_functional.")
        if not node.users and (is_collective or not node.is_impure()):
            graph.erase_node(node)
    return graph


def _same_as(node: fx.Node) -> fx.Node | None:
    """The earlier node whose value this one has, if it does nothing."""
    if node.target in _IDENTITIES:
        return node.all_input_nodes[0]
    if node.target in _SWAPS:
        (source,) = node.all_input_nodes
        if source.target is node.target and source.args[1:] == node.args[1:]:
            return source.all_input_nodes[0]
    return None
