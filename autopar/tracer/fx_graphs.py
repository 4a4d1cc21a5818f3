"""Helpers for FX graphs: the outputs of a joint graph with their descriptors, new calls in one, and
running dynamo's graphs so that each op belongs to the module that it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from autopar.tracer.torch_private import annotate

MODULE_KEY = "autopar_module"
"""Where a node's `meta["custom"]` holds its module's path."""


def outputs_of(gm: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """The items of the output node and their descriptors."""
    output = gm.graph.output_node()
    return list(output.args[0]), list(output.meta["desc"])  # pyright: ignore[reportArgumentType]


META = ("custom", "partitioner_tag", "seq_nr", "stack_trace")
"""The metadata that says where in the model a node comes from."""


def call_before(node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A call in front of `node`, in its place in the model, whose result is like `value`."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta.update({key: node.meta[key] for key in META if key in node.meta})
    call.meta["val"] = value
    return call


def replace_node(node: fx.Node, other: fx.Node) -> None:
    """Put `other` in the place of `node`, which is erased."""
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def set_outputs(gm: fx.GraphModule, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Have the graph return these items, with their descriptors."""
    output = gm.graph.output_node()
    kept = list(pairs)
    output.args = ([item for item, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]


def labelled(gm: fx.GraphModule, values: Sequence[Any]) -> Any:
    """`gm(*values)`, every node labelled with the path of its module, as `nn_module_stack` has
    it."""
    return _Labelling(gm).run(*values)


class _Labelling(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        stack = list((n.meta.get("nn_module_stack") or {}).values())
        # The first part of a path is the variable that holds the model.
        path = stack[-1][0].partition(".")[2] if stack else ""
        with annotate({MODULE_KEY: path}):
            return super().run_node(n)
