"""What modules return: the tensors that are made inside and used outside of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.ir.grouping import grouped
from autopar.ir.uses import root_of
from autopar.plans.matching import matches, outer_names

_CHANGES = (Role.MUTATION, Role.UPDATE)


@dataclass(frozen=True, slots=True)
class Returned:
    """`root` is what `module` returns, seen through the views `chain`, the one next to the root
    first; `tensor` is the result of them."""

    module: str
    root: Ref
    chain: tuple[int, ...]
    tensor: Ref


def returned(graph: Graph, pattern: str) -> Iterator[Returned]:
    """The floating-point tensors that modules matched by `pattern` hand to the rest of the forward
    phase, in order."""
    readers = (n for n in graph.nodes if n.phase is Phase.FORWARD and n.role not in _CHANGES)
    users = grouped((ref, node) for node in readers for ref in node.inputs)
    for ref, using in sorted(users.items()):
        maker = graph.nodes[ref.node]
        if maker.role is not Role.OP or "float" not in graph.type_of(ref).dtype:
            continue
        for module in (maker.module, *outer_names(maker.module)):
            if matches(pattern, module) and not all(_is_inside(user, module) for user in using):
                root, chain = root_of(graph, ref)
                yield Returned(module, root, chain, ref)


def _is_inside(user: Node, module: str) -> bool:
    """Whether an op belongs to a module. What the model returns is outside of all."""
    return user.role is Role.OP and (user.module == module or module in outer_names(user.module))
