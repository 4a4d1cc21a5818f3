"""Which nodes share a decision: the keys of classes.

A key is the module's path with numbers replaced by `*`, the phase, the op's name and its ordinal
among the module's ops of that name: `model.layers.*.mlp.down_proj:forward:mm.0`. Nodes of one key
are alike in op, arguments, types and factors. Where they differ, all variants but the first get a
suffix: `~1`, `~2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Node, Ref, Role, TensorType

_NUMBERED_BY_POSITION = frozenset(
    {Role.INPUT, Role.TANGENT, Role.LOSS, Role.VALUE, Role.DETACHED, Role.CONSTANT}
)


def pattern(path: str) -> str:
    """A dotted path with its numbers replaced by `*`.

    >>> pattern("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def with_keys(graph: Graph) -> Graph:
    """`graph` with the key of every node."""
    ordinals = Counter[tuple[str, str, str]]()
    variants: dict[str, dict[object, int]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        base = _base_key(node, ordinals)
        numbers = variants.setdefault(base, {})
        variant = numbers.setdefault(_signature(graph, node), len(numbers))
        nodes.append(replace(node, key=f"{base}~{variant}" if variant else base))
    return replace(graph, nodes=tuple(nodes))


def _base_key(node: Node, ordinals: Counter[tuple[str, str, str]]) -> str:
    if node.role is not Role.OP:
        target = node.target if node.role in _NUMBERED_BY_POSITION else pattern(node.target)
        return f"{'external' if node.external else node.role.value}:{target}"
    place = (node.module, node.phase.value, short_name(node.op))
    ordinals[place] += 1
    return f"{pattern(node.module)}:{node.phase.value}:{place[-1]}.{ordinals[place] - 1}"


def short_name(op: str) -> str:
    """An op's name without its namespace and overload.

    >>> short_name("aten.mm.default")
    'mm'
    """
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _signature(graph: Graph, node: Node) -> object:
    """What nodes of one key have in common."""
    return (
        node.op,
        node.role,
        without_refs(node.args),
        tuple((k, without_refs(v)) for k, v in node.kwargs),
        tuple(_form(graph, t) for t in graph.input_types(node)),
        tuple(_form(graph, t) for t in node.outputs),
        tuple((f.name, f.inputs, f.outputs, f.type) for f in node.factors),
        node.partial,
        node.mean,
        node.view,
        node.has_rule,
    )


def without_refs(arg: Arg) -> object:
    """An argument with "tensor" for every tensor; numbers come with their type, so that 1 and True
    differ."""
    if isinstance(arg, tuple):
        return tuple(without_refs(a) for a in arg)
    return "tensor" if isinstance(arg, Ref) else (type(arg).__name__, arg)


def _form(graph: Graph, tensor: TensorType) -> object:
    """A tensor's type, with the sizes of its atoms in the place of the atoms."""

    def sizes(parts: Iterable[int]) -> tuple[tuple[int, bool], ...]:
        return tuple((graph.atoms[a].size, graph.atoms[a].in_param) for a in parts)

    return tensor.dtype, tuple(map(sizes, tensor.parts))
