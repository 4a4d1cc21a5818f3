"""Graphs that are quick to write."""

from __future__ import annotations

from typing import Any

from torch import fx

_names: dict[Any, str] = {}
"""What torch derives from a function for the names of its calls."""


class LeanGraph(fx.Graph):
    """An fx.Graph whose nodes are given their arguments once they are there. Creating a node with
    them, torch looks through all for symbolic sizes, of which local graphs have none; that takes
    longer than the rest."""

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """As `fx.Graph.create_node`."""
        if name is None and op == "call_function":
            name = _names.get(target)
            if name is None:
                name = _names[target] = self._target_to_str(target)
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node
