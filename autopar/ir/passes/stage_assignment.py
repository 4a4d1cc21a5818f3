"""Which stage of a pipeline computes each op of a step that is cut.

Forward is cut where the first op of a stage stands. What depends on the model's inputs alone, or on
its parameters alone, belongs to no stage: each computes what it needs of it, so that masks,
positions and casts of weights do not travel. Backward follows forward: an op belongs to the latest
stage that has the gradients it reads, but to none behind those whose forward has what else it reads
or computes its module.

What adds up the gradient of a parameter that several stages use is *shared* among them: each adds
up its own terms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import StageError
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import is_result
from autopar.ir.uses import root_of

SUM = "aten.add.Tensor"

StageSet = frozenset[int]
"""Stages: that of an op, or those that share it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per op the stages that compute it; those that are missing each stage computes that needs
    them. `readers` has the stages whose forward makes or reads what a node makes."""

    of: Mapping[int, StageSet]
    readers: Mapping[int, StageSet]

    def stage_of(self, node: Node) -> int | None:
        """The stage of an op; None if it has none of its own, or several share it."""
        stages = self.of.get(node.index, ())
        return next(iter(stages)) if len(stages) == 1 else None


def assign(graph: Graph, cuts: Sequence[int]) -> Assignment:
    """Who computes what if the stages of `graph`, but for the first, begin at the nodes `cuts`.
    StageError if one would need what only a later one makes."""
    finder = _Finder(graph, cuts)
    readers = finder.run()
    return Assignment(finder.of, readers)


def forward_readers(graph: Graph, cuts: Sequence[int]) -> Mapping[int, StageSet]:
    """The stages whose forward makes or reads what a node makes, whether backward can be cut there
    or not."""
    finder = _Finder(graph, cuts)
    finder.place_forward()
    return finder.readers()


def belongs_nowhere(graph: Graph, node: Node) -> bool:
    """Whether an op is computed by each stage that needs it."""
    return _sources(graph)[node.index] is not None or _is_saved_view(graph, node)


class _Finder:
    def __init__(self, graph: Graph, cuts: Sequence[int]) -> None:
        self.graph, self.cuts = graph, cuts
        self.of: dict[int, StageSet] = {}
        self.modules: dict[str, StageSet] = {}
        """The stages whose forward has ops of a module."""

    def run(self) -> dict[int, StageSet]:
        """Finds who computes each op, and returns who reads what forward makes."""
        placed = self.place_forward()
        readers = self.readers()
        owners, sums = _owners(self.graph, readers)
        least = self._least(owners)
        for node in placed:
            if node.phase is Phase.BACKWARD:
                stages, given = owners.get(node.index, frozenset()), self._given(node)
                if node.index in sums and len(given) > 1 and given <= stages:
                    self.of[node.index] = given
                else:
                    able = frozenset(s for s in stages if s >= least.get(node.index, 0))
                    self._place_backward(node, readers, able)
        return readers

    def place_forward(self) -> list[Node]:
        """Finds who computes each op of forward, and returns all ops that have a place."""
        placed = [n for n in self.graph.with_role(Role.OP) if not belongs_nowhere(self.graph, n)]
        for node in placed:
            if node.phase is Phase.FORWARD:
                self._place_forward(node)
        return placed

    def _least(self, owners: Mapping[int, StageSet]) -> dict[int, int]:
        """Of ops that are for the gradient of one parameter, the first stage that has what they and
        all after them read of forward."""
        least: dict[int, int] = {}
        for node in reversed(self.graph.nodes):
            roots = (root_of(self.graph, ref)[0].node for ref in node.inputs)
            stages = [
                min(self.of[root])
                for root in roots
                if root in self.of and self.graph.nodes[root].phase is Phase.FORWARD
            ]
            if node.index in owners:
                own = max((least.get(node.index, 0), *stages))
                for ref in node.inputs:
                    least[ref.node] = max(least.get(ref.node, 0), own)
                least[node.index] = own
        return least

    def _place_forward(self, node: Node) -> None:
        home = frozenset((bisect_right(self.cuts, node.index),))
        if node.view or is_result(node):
            home = self.of.get(node.inputs[0].node, home)
        self.of[node.index] = home
        self.modules[node.module] = self.modules.get(node.module, frozenset()) | home

    def readers(self) -> dict[int, StageSet]:
        """The stages whose forward makes or reads what a node makes, or what backward makes that of
        without any gradient."""
        readers: dict[int, StageSet] = {}
        for node in reversed(self.graph.nodes):
            if node.phase is Phase.FORWARD:
                own = self.of.get(node.index, frozenset())
                readers[node.index] = readers.get(node.index, frozenset()) | own
                reads = own if own and not node.view else readers[node.index]
                for ref in node.inputs:
                    readers[ref.node] = readers.get(ref.node, frozenset()) | reads
        for node in self.graph.with_role(Role.OP):
            if node.phase is Phase.BACKWARD and all(ref.node in readers for ref in node.inputs):
                readers[node.index] = frozenset[int]().union(
                    *(readers[r.node] for r in node.inputs)
                )
        return readers

    def _given(self, node: Node) -> StageSet:
        """The stages that make the gradients an op reads."""
        return frozenset[int]().union(
            *(
                self.of.get(ref.node, ())
                for ref in node.inputs
                if self.graph.nodes[ref.node].phase is Phase.BACKWARD
            )
        )

    def _place_backward(self, node: Node, readers: dict[int, StageSet], stages: StageSet) -> None:
        """The one stage that does an op: if it can be, one of `stages`, which use the parameter
        whose gradient alone it is for."""
        latest = home = min(self._given(node), default=len(self.cuts))
        seen = [readers[ref.node] for ref in node.inputs if ref.node in readers]
        if not node.view:
            seen.append(self.modules.get(node.module, frozenset()))
            home = min((home, *(max(stages) for stages in seen if stages)))
            home = min(latest, max((home, *(min(stages) for stages in seen if stages))))
        if home not in stages and not any(ref.node in readers for ref in node.inputs):
            home = max((stage for stage in stages if stage <= latest), default=home)
        self.of[node.index] = frozenset((home,))
        for ref in node.inputs:
            root, _ = root_of(self.graph, ref)
            makers = self.of.get(root.node, frozenset((home,)))
            if self.graph.nodes[root.node].phase is Phase.FORWARD and min(makers) > home:
                raise StageError(
                    f"no such stages: backward of {node.module or 'the model'} ({node.op}) would "
                    f"need in stage {home} what stage {min(makers)} makes"
                )


def is_of_parameters(graph: Graph, ref: Ref) -> bool:
    """Whether a tensor is a parameter, or computed of parameters alone."""
    return _sources(graph)[ref.node] == frozenset((Role.PARAM,))


_Sources = frozenset[Role]
"""Of inputs and parameters, what something is made of; none if it is the same in every step."""


@per_graph
def _sources(graph: Graph) -> dict[int, _Sources | None]:
    """What each node is made of, where every stage may compute what it needs of it: inputs alone,
    or parameters alone. None for all others: of both, or what draws random numbers, adds up what
    turns make, reads what forward changes, or is a gradient."""
    changed = {node.target for node in graph.with_role(Role.MUTATION, Role.UPDATE)}
    sources: dict[int, _Sources | None] = {}
    for node in graph.nodes:
        given = [sources[ref.node] for ref in node.inputs]
        known = [each for each in given if each is not None]
        roles = frozenset[Role]().union(*known)
        if node.role in (Role.INPUT, Role.PARAM):
            roles = frozenset((node.role,))
        is_own = node.random or is_result(node) or node.role is Role.TANGENT or len(roles) > 1
        is_own |= len(known) < len(given) or node.target in changed
        sources[node.index] = None if is_own else roles
    return sources


def _is_saved_view(graph: Graph, node: Node) -> bool:
    """Whether backward takes a view of what forward made, as it may anywhere."""
    if not node.view or node.phase is Phase.FORWARD:
        return False
    root, _ = root_of(graph, Ref(node.index))
    return graph.nodes[root.node].phase is Phase.FORWARD


def _owners(graph: Graph, readers: dict[int, StageSet]) -> tuple[dict[int, StageSet], set[int]]:
    """The ops that are for the gradient of one parameter and nothing else, with the stages that use
    the parameter; and those among them that make of a sum the sum of what they make of its terms,
    as do all after them."""
    params = {node.target: readers[node.index] for node in graph.with_role(Role.PARAM)}
    users = grouped((ref.node, node.index) for node in graph.nodes for ref in node.inputs)
    owners: dict[int, StageSet] = {}
    sums: set[int] = set()
    for node in reversed(graph.nodes):
        if node.phase is not Phase.BACKWARD or len(users.get(node.index, ())) != 1:
            continue
        user = graph.nodes[users[node.index][0]]
        is_grad = user.role is Role.GRAD
        if is_grad or user.index in owners:
            owners[node.index] = params[user.target] if is_grad else owners[user.index]
            if (is_grad or user.index in sums) and _is_additive(graph, node):
                sums.add(node.index)
    return owners, sums


def _is_additive(graph: Graph, node: Node) -> bool:
    """Whether an op makes of a sum of gradients the sum of what it makes of each, and of no input
    of the model."""
    sources = _sources(graph)
    if node.op == SUM:
        # A stage that has one term alone takes it for the sum.
        types = {graph.type_of(ref) for ref in (*node.inputs, Ref(node.index))}
        return len(node.inputs) == 2 and len(types) == 1 and not node.kwargs
    given = {k for k, ref in enumerate(node.inputs) if sources[ref.node] is None}
    others = (sources[ref.node] for ref in node.inputs)
    if len(given) != 1 or any(each and Role.INPUT in each for each in others):
        return False
    return node.view or any(given == set(entry) for entry in node.partial)
