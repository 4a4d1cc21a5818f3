"""What ops read and what they make, in words: what a plan says of each class of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Node, Role, TensorType
from autopar.ir.sharding import Sharding
from autopar.ir.uses import Group, root_key
from autopar.plans.layout import Layout

Words = tuple[tuple[str, str], ...]
Reads = Mapping[tuple[int, int], tuple[Group, Sharding]]


def reads(layout: Layout, all_groups: Sequence[Group]) -> Reads:
    """Per (node, tensor input): the group it belongs to, and the state its root is in for that."""
    return {
        (use.node, use.arg): (group, state)
        for group in all_groups
        for use, state in zip(group.uses, layout.asked(group), strict=True)
    }


def inputs(layout: Layout, node: Node, found: Reads) -> Words:
    """(key of the root, the sharding it is in to be read) of each tensor input."""
    read = (found[node.index, arg] for arg in range(len(node.inputs)))
    return tuple((root_key(layout.graph, group.root), str(state)) for group, state in read)


def outputs(layout: Layout, node: Node) -> Words:
    """(type, sharding) of each output; a parameter's sharding is how it is stored."""
    if node.role is Role.PARAM:
        return ((type_text(node.outputs[0]), str(layout.params[node.target].storage)),)
    states = layout.pair(node)[1]
    return tuple((type_text(t), str(state)) for t, state in zip(node.outputs, states, strict=True))


def type_text(tensor: TensorType) -> str:
    """`bfloat16[64, 4096]`"""
    return f"{tensor.dtype}{list(tensor.shape)}"
