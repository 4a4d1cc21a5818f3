"""Which stage of a pipeline computes each op of a step that is cut.

Forward is cut at the first op of each stage. An op that depends on the model's inputs alone, or on
its parameters alone, belongs to no stage: each stage computes what it needs of it. So masks,
positions and casts of weights do not travel.

Backward follows forward. An op belongs to the latest stage that has the gradients it reads. But it
belongs to no stage behind those whose forward has its other inputs or computes its module.

The sum of the gradients of a parameter that several stages use is *shared* among them: each adds up
its own terms.
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
"""The stage of an op, or the stages that share it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per op the stages that compute it. An op that is missing is computed by each stage that needs
    it. `readers` has, per node, the stages whose forward makes or reads its outputs."""

    of: Mapping[int, StageSet]
    readers: Mapping[int, StageSet]

    def stage_of(self, node: Node) -> int | None:
        """The stage of an op; None if it has none of its own, or several share it."""
        stages = self.of.get(node.index, ())
        return next(iter(stages)) if len(stages) == 1 else None


def assign(graph: Graph, cuts: Sequence[int]) -> Assignment:
    """The assignment if all stages of `graph` but the first begin at the nodes `cuts`. StageError
    if a stage would need what only a later one makes."""
    finder = _Finder(graph, cuts)
    readers = finder.run()
    return Assignment(finder.of, readers)


def forward_readers(graph: Graph, cuts: Sequence[int]) -> Mapping[int, StageSet]:
    """Per node, the stages whose forward makes or reads its outputs, whether backward can be cut
    there or not."""
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
        """Assign each op to its stages. Returns `readers()`."""
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
        """Assign each op of forward to its stage. Returns all ops that belong to a stage."""
        placed = [n for n in self.graph.with_role(Role.OP) if not belongs_nowhere(self.graph, n)]
        for node in placed:
            if node.phase is Phase.FORWARD:
                self._place_forward(node)
        return placed

    def _least(self, owners: Mapping[int, StageSet]) -> dict[int, int]:
        """Per op that is for the gradient of one parameter, the first stage that has what the op
        and all after it read of forward."""
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
        """Per node, the stages whose forward makes or reads its outputs. Ops of backward that read
        no gradient count as well."""
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
        """Assign an op of backward to one stage. For an op that is for the gradient of one
        parameter alone, `stages` are those that use the parameter, and one of them is preferred."""
        latest = home = min(self._given(node), default=len(self.cuts))
        seen = [readers[ref.node] for ref in node.inputs if ref.node in readers]
        if not node.view:
            seen.append(self.modules.get(node.module, frozenset()))
            home = min((home, *(max(each) for each in seen if each)))
            home = min(latest, max((home, *(min(each) for each in seen if each))))
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
"""What a tensor depends on: inputs, parameters, both; nothing if it is the same in every step."""


@per_graph
def _sources(graph: Graph) -> dict[int, _Sources | None]:
    """What each node depends on, if any stage may compute it: inputs alone, or parameters alone.
    None for all others. These depend on both, draw random numbers, add up microbatches, read what
    forward changes, or are gradients."""
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
    """Whether a node is a view in backward of a tensor of forward. Any stage may take it."""
    if not node.view or node.phase is Phase.FORWARD:
        return False
    root, _ = root_of(graph, Ref(node.index))
    return graph.nodes[root.node].phase is Phase.FORWARD


def _owners(graph: Graph, readers: dict[int, StageSet]) -> tuple[dict[int, StageSet], set[int]]:
    """(owners, sums): the ops that are for the gradient of one parameter alone, with the stages
    that use the parameter; and those among them that are additive, as are all after them."""
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
    """Whether an op maps a sum of gradients to the sum of its results for each, and reads nothing
    that depends on the model's inputs alone."""
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
