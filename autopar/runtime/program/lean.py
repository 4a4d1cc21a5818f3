"""Graphs that are fast to write.

torch searches the arguments of every new node for symbolic sizes, of which autopar's graphs have
none. It also updates its tables whenever an attribute of a node is set. Both take longer than the
rest. So a node is created without arguments, and gets them from the property's own function.
"""

from __future__ import annotations

from typing import Any

from torch import fx

_set_args: Any = fx.Node.args.fset
_set_kwargs: Any = fx.Node.kwargs.fset

_names: dict[Any, str] = {}
"""What torch derives from a function for the names of its calls."""


def give(node: fx.Node, args: Any, kwargs: Any) -> None:
    """`node.args, node.kwargs = args, kwargs`."""
    if args:
        _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)


class LeanGraph(fx.Graph):
    """An fx.Graph whose nodes are created quickly."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that is `target(*args, **kwargs)`."""
        return self.call_function(target, args, kwargs)

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
            if target not in _names:
                _names[target] = self._target_to_str(target)
            name = _names[target]
        node = super().create_node(op, target, None, None, name, type_expr)
        give(node, args, kwargs)
        return node
