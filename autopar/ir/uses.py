"""Who uses which tensor: the groups of uses that share redistributions.

Views compute nothing, so a use of a view is a use of its *root*: the output of an op that is no
view, or a placeholder. The root is redistributed, and the views are taken of the result. All uses
of one root in one phase form a `Group`: a redistribution that several of them need happens once.

A root of forward that backward uses as well has a group in each phase: it *crosses*. It is saved
for backward in one state, from which the group of backward starts. Prices and code generation both
start from these groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.choices import pull_back
from autopar.ir.graph import Graph, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Use:
    """Tensor input `arg` of node `node` reads a root through `chain`, the views between them, the
    one next to the root first."""

    node: int
    arg: int
    chain: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The uses of `root` in `phase`. `key` is equal for groups of equal blocks whose uses are
    alike, and only for them. A group `crosses` if its root has a group in the other phase too."""

    key: str
    root: Ref
    phase: Phase
    uses: tuple[Use, ...]
    crosses: bool = False


def root_of(graph: Graph, ref: Ref) -> tuple[Ref, tuple[int, ...]]:
    """The root of `ref`, and the views that lead from it to `ref`, the first next to the root."""
    chain: list[int] = []
    while graph.nodes[ref.node].view:
        chain.append(ref.node)
        ref = graph.nodes[ref.node].inputs[0]
    return ref, tuple(reversed(chain))


def requirement(graph: Graph, use: Use, sharding: Sharding) -> Sharding | None:
    """The root's sharding that gives the use its input in `sharding`; None if there is none."""
    current: Sharding | None = sharding
    for index in reversed(use.chain):
        if current is not None:
            current = pull_back(graph, graph.nodes[index], current)
    return current


@per_graph
def groups(graph: Graph) -> tuple[Group, ...]:
    """Every group of the graph, in order of the root and then of the phase."""
    uses = grouped(
        ((root, node.phase), Use(node.index, arg, chain))
        for node in graph.nodes
        if not node.view
        for arg, (root, chain) in enumerate(root_of(graph, ref) for ref in node.inputs)
    )
    signatures: dict[str, dict[tuple[object, ...], int]] = {}
    all_groups: list[Group] = []
    for root, phase in sorted(uses, key=lambda item: (item[0], item[1].value)):
        members = tuple(uses[root, phase])
        base = f"{root_key(graph, root)}@{phase.value}"
        seen = signatures.setdefault(base, {})
        crosses = all((root, each) in uses for each in Phase)
        ordinal = seen.setdefault((crosses, *_signature(graph, members)), len(seen))
        key = f"{base}#{ordinal}" if ordinal else base
        all_groups.append(Group(key, root, phase, members, crosses))
    return tuple(all_groups)


SAVED = "saved:"
"""The prefix of an activation's key in the name of the decision how it is saved."""


def root_key(graph: Graph, root: Ref) -> str:
    """The class of a root: its node's key, and which output it is where there are several."""
    node = graph.nodes[root.node]
    return f"{node.key}.{root.output}" if len(node.outputs) > 1 else node.key


def _signature(graph: Graph, uses: Sequence[Use]) -> tuple[object, ...]:
    return tuple(
        sorted(
            (graph.nodes[u.node].key, u.arg, tuple(graph.nodes[v].key for v in u.chain))
            for u in uses
        )
    )


def is_saved(graph: Graph, group: Group) -> bool:
    """Whether the group's root crosses from forward to backward as an activation."""
    root = graph.nodes[group.root.node]
    return group.phase is Phase.BACKWARD and root.phase is Phase.FORWARD and root.role is Role.OP


@per_graph
def read_in_forward(graph: Graph) -> frozenset[str]:
    """The classes all of whose nodes are read in forward. Parameters of other classes have no
    sharding for backward to choose."""
    read = {each.root.node for each in groups(graph) if each.phase is Phase.FORWARD}
    unread = {node.key for node in graph.nodes if node.index not in read}
    return frozenset(graph.nodes[index].key for index in read) - unread
