"""A step cut into the stages of a pipeline: a graph for each, whose backward may come in two parts.

A stage's graph is one like any other: it is priced, solved, scheduled and written like the graph of
a model that happens to be as small. Two ops of autopar's own connect stages: `RECEIVE` makes what
comes from another stage, `SEND` reads what another stage needs. Both are laid out on the stage's
mesh as all ops are. A tensor goes straight to the stages that need it, once each, in the phase that
makes it. Backward reads what came forward from the saved activations.

The graph that is cut is that in microbatches: each microbatch sends its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from autopar.errors import StageError
from autopar.ir.graph import (
    OUTPUT_ROLES,
    Graph,
    Node,
    Phase,
    Ref,
    Role,
    TensorType,
    per_graph,
    transplanted,
)
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import MICROBATCH, RECEIVE, SEND, is_end, whole_factors
from autopar.ir.passes.stage_assignment import Assignment, assign, forward_readers
from autopar.ir.uses import root_of


@dataclass(frozen=True, slots=True, order=True)
class StageLink:
    """A tensor of the whole step, by name, that stage `source` sends to stage `target` in every
    microbatch."""

    source: int
    target: int
    phase: Phase
    name: str


def link_of(node: Node, stage: int) -> StageLink:
    """The link of a `SEND` or `RECEIVE` of a stage."""
    other = node.args[-1]
    assert isinstance(other, int)
    ends = (stage, other) if node.op == SEND else (other, stage)
    return StageLink(*ends, node.phase, node.target)


@per_graph
def first_ops(graph: Graph) -> Mapping[str, int]:
    """The first op of forward of each module, ops of its submodules included."""
    first: dict[str, int] = {}
    for node in graph.with_role(Role.OP):
        if node.phase is Phase.FORWARD:
            parts = node.module.split(".")
            for count in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:count]), node.index)
    return first


def cut_at(graph: Graph, module: str) -> int:
    """The node at which a stage begins whose first module is `module`: the first op of forward that
    belongs to it. StageError if there is none."""
    index = first_ops(graph).get(module)
    if index is None:
        raise StageError(f"no stage begins at {module!r}: the model computes nothing there")
    return index


class Cut(NamedTuple):
    """Which stage a graph is: stage `number`, where all stages but the first begin with the modules
    `starts`."""

    starts: tuple[str, ...] = ()
    number: int = 0


def one_stage(graph: Graph, cut: Cut) -> Graph:
    """A pass: takes a step in microbatches, gives one stage of it, with its sends and receives. The
    stage's nodes keep their keys and their order. StageError if the step cannot be cut so."""
    known = _cut(graph)
    if cut.starts not in known:
        known[cut.starts] = in_stages(graph, [cut_at(graph, start) for start in cut.starts])
    return known[cut.starts][cut.number]


@per_graph
def _cut(_: Graph) -> dict[tuple[str, ...], tuple[Graph, ...]]:
    """The stages of a graph, by the modules that they begin with."""
    return {}


def in_stages(graph: Graph, cuts: Sequence[int]) -> tuple[Graph, ...]:
    """`graph`, in microbatches, as one graph per stage. All stages but the first begin at the ops
    `cuts` of forward. StageError, with the reason, if it cannot be cut so."""
    if any(a >= b for a, b in pairwise(cuts)):
        raise StageError("stages are listed in the order in which the model computes them")
    graph = _with_microbatches_of_forward(graph, cuts)
    return _Cutter(graph, assign(graph, cuts), len(cuts) + 1).run()


def _with_microbatches_of_forward(graph: Graph, cuts: Sequence[int]) -> Graph:
    """`graph`, in which forward and backward share the microbatch of an op's result, if several
    stages read it in forward. An example is noise that a loss compares with. So these stages are
    sent the microbatch alone, not the tensor of the whole batch."""
    microbatches = [
        node
        for node in graph.with_role(Role.OP)
        if node.op == MICROBATCH and graph.nodes[node.inputs[0].node].role is Role.OP
    ]
    if not microbatches:
        return graph
    readers = forward_readers(graph, cuts)
    cut: dict[tuple[Ref, TensorType], Ref] = {}
    other: dict[Ref, Ref] = {}
    for node in microbatches:
        kind = node.inputs[0], node.outputs[0]
        if node.phase is Phase.FORWARD:
            cut[kind] = Ref(node.index)
        elif kind in cut and len(readers[cut[kind].node]) > 1:
            other[Ref(node.index)] = cut[kind]
    if not other:
        return graph
    nodes = (transplanted(n, n.index, lambda ref: other.get(ref, ref)) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _modules(name: str) -> list[str]:
    """The modules that a parameter is in, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


class _Cutter:
    def __init__(self, graph: Graph, assignment: Assignment, count: int) -> None:
        self.graph, self.assignment, self.count = graph, assignment, count
        self.own: list[set[int]] = []
        """The nodes of each stage."""
        self.sent: dict[tuple[Ref, int], int] = {}
        """Per tensor and stage that receives it, the stage that sends it."""
        self.needs: list[tuple[Ref, int]] = []

    def _unread(self) -> Iterator[tuple[int, int]]:
        """The parameters that nobody reads, each with a stage: the one that reads others of the
        innermost module with any such. A program for another call, such as with another adapter,
        may read the parameter there."""
        read = {ref.node for node in self.graph.nodes for ref in node.inputs}
        stages: dict[str, int] = {}
        unread: list[Node] = []
        for node in self.graph.with_role(Role.PARAM):
            if node.index not in read:
                unread.append(node)
                continue
            for module in _modules(node.target):
                stages.setdefault(
                    module, min(self.assignment.readers.get(node.index, ()), default=0)
                )
        for node in unread:
            known = (stages[module] for module in _modules(node.target) if module in stages)
            yield node.index, next(known, 0)

    def run(self) -> tuple[Graph, ...]:
        # Every rank is passed the model's inputs, whichever of them it reads.
        inputs = {node.index for node in self.graph.with_role(Role.INPUT)}
        self.own = [set(inputs) for _ in range(self.count)]
        for index, stage in self._unread():
            self.own[stage].add(index)
        for node in self.graph.with_role(*OUTPUT_ROLES):
            for stage in self._leaves_from(node):
                self.own[stage].add(node.index)
                self._need(node, stage)
        # What draws random numbers draws them even if nobody reads what it makes.
        for node in filter(lambda node: node.random, self.graph.nodes):
            for stage in self.assignment.of[node.index]:
                self.own[stage].add(node.index)
                self._need(node, stage)
        while self.needs:
            self._bring(*self.needs.pop())
        for stage in range(self.count):
            if not any(
                self.assignment.stage_of(self.graph.nodes[n]) == stage for n in self.own[stage]
            ):
                raise StageError(f"stage {stage} would have nothing to compute")
        graphs = tuple(self._build(stage) for stage in range(self.count))
        _check_owners(graphs)
        return graphs

    def _leaves_from(self, node: Node) -> frozenset[int]:
        """The stages that have an output of the step."""
        return self.assignment.of.get(node.inputs[0].node, frozenset((self.count - 1,)))

    def _need(self, node: Node, stage: int) -> None:
        """Note that a stage needs what it reads to compute a node."""
        self.needs += ((ref, stage) for ref in self._read(node, stage))

    def _read(self, node: Node, stage: int) -> list[Ref]:
        """What a stage reads to compute a node: of a sum that stages share, its own terms."""
        if len(self.assignment.of.get(node.index, ())) <= 1:
            return list(node.inputs)
        return [ref for ref in node.inputs if stage in self.assignment.of.get(ref.node, (stage,))]

    def _bring(self, ref: Ref, stage: int) -> None:
        """Have a stage compute `ref`, or have it sent to the stage."""
        node = self.graph.nodes[ref.node]
        assignment = self.assignment.of.get(ref.node, frozenset((stage,)))
        if node.index in self.own[stage] or (ref, stage) in self.sent:
            return
        if stage in assignment or (node.view and self._is_cheaper_whole(ref)):
            self.own[stage].add(node.index)
            self._need(node, stage)
            return
        (home,) = assignment
        self.sent[ref, stage] = home
        self.needs.append((ref, home))

    def _is_cheaper_whole(self, ref: Ref) -> bool:
        """Whether a view's root has no more bytes than the view."""
        root, _ = root_of(self.graph, ref)
        return self.graph.type_of(root).num_bytes <= self.graph.type_of(ref).num_bytes

    def _build(self, stage: int) -> Graph:
        coming = {ref for ref, target in self.sent if target == stage}
        going = grouped(
            (ref.node, (ref, target))
            for (ref, target), home in sorted(self.sent.items())
            if home == stage
        )
        nodes: list[Node] = []
        place: dict[Ref, Ref] = {}

        def put(node: Node) -> Ref:
            nodes.append(transplanted(node, len(nodes), lambda ref: place.get(ref, ref)))
            return Ref(nodes[-1].index)

        for node in self.graph.nodes:
            refs = [Ref(node.index, k) for k in range(len(node.outputs))]
            for ref in refs:
                if ref in coming:
                    place[ref] = put(_receive(self.graph, ref, self.sent[ref, stage]))
            if node.index not in self.own[stage]:
                continue
            terms = self._read(node, stage)
            if len(terms) < len(node.inputs):
                place[Ref(node.index)] = place[terms[0]]
            else:
                at = put(node)
                place |= {ref: replace(at, output=ref.output) for ref in refs if ref not in coming}
            for ref, target in going.get(node.index, ()):
                nodes.append(_send(self.graph, ref, place[ref], target, len(nodes)))
        return replace(self.graph, nodes=tuple(nodes))


def _receive(graph: Graph, ref: Ref, source: int) -> Node:
    """The node that makes what stage `source` sends."""
    return replace(
        _own(graph, ref, RECEIVE, source),
        outputs=(graph.type_of(ref),),
        factors=tuple(replace(f, inputs=()) for f in whole_factors(graph.type_of(ref))),
    )


def _send(graph: Graph, ref: Ref, read: Ref, target: int, index: int) -> Node:
    """The node that sends `read`, which is `ref` of the whole step, to stage `target`."""
    return replace(
        _own(graph, ref, SEND, target),
        index=index,
        args=(read, target),
        inputs=(read,),
        factors=tuple(replace(f, outputs=()) for f in whole_factors(graph.type_of(ref))),
    )


def _own(graph: Graph, ref: Ref, op: str, other: int) -> Node:
    maker, word = graph.nodes[ref.node], op.split(".")[1]
    module, _, tail = maker.key.rpartition(":")
    return Node(
        0,
        f"{maker.name}_{ref.output}_{word}_{other}",
        op,
        Role.OP,
        maker.phase,
        args=(other,),
        module=maker.module,
        key=f"{module.partition(':')[0]}:{maker.phase.value}:{word}.{tail}.{ref.output}",
        target=f"{maker.name}.{ref.output}",
        source_line=maker.source_line,
    )


def _check_owners(graphs: Sequence[Graph]) -> None:
    """StageError if a buffer or parameter that forward changes is read by several stages, or a
    gradient is made where its parameter is not, as between the ops of a batch norm."""
    for stage, graph in enumerate(graphs):
        gradients, params = (
            {n.target for n in graph.with_role(r)} for r in (Role.GRAD, Role.PARAM)
        )
        if lost := sorted(gradients - params):
            raise StageError(
                f"no such stages: the gradient of {lost[0]} is made by stage {stage}, and another "
                "reads it"
            )
        changed = {node.target for node in graph.with_role(Role.MUTATION, Role.UPDATE)}
        for other in (*graphs[:stage], *graphs[stage + 1 :]):
            read = {node.target for node in other.with_role(Role.BUFFER, Role.PARAM)}
            if both := sorted(changed & read):
                raise StageError(
                    f"no such stages: {both[0]} is changed by stage {stage}, and another reads it"
                )


# A stage whose backward comes in two parts, as another graph.
#
# The first part, `B` in a pipeline schedule (`pipeline`), is what other stages wait for: the
# gradients that are sent to them, and all that these need. Whatever the stage receives belongs to
# the first part too. The second part, `W`, is the rest: gradients of parameters, their sums, and
# ops that lead to nothing else. Ops of the second part come behind all others; within each part
# they keep their order. A stage that sends no gradient has all its backward in the second part.
#
# A recomputed op is one like any: it is in the part that needs it, in the first if both do.


def waited_for(graph: Graph) -> frozenset[int]:
    """The ops of backward that belong to its first part."""
    first_part = set[int]()
    for node in reversed(graph.nodes):
        if _may_wait(node) and (is_end(node) or node.index in first_part):
            first_part.add(node.index)
            first_part.update(ref.node for ref in node.inputs)
    return frozenset(index for index in first_part if _may_wait(graph.nodes[index]))


def _may_wait(node: Node) -> bool:
    """Whether a node belongs to one of the parts: it is an op of backward, or an output."""
    return node.phase is Phase.BACKWARD and (node.role is Role.OP or node.role in OUTPUT_ROLES)


def in_two_parts(graph: Graph, is_split: bool = True) -> Graph:
    """A pass: takes a stage, gives it with its backward in two parts, if it `is_split`. All nodes
    stay, those of the second part come last."""
    if not is_split:
        return graph
    first = waited_for(graph)

    def is_second(node: Node) -> bool:
        return _may_wait(node) and node.index not in first

    order = sorted(graph.nodes, key=is_second)
    place = {node.index: index for index, node in enumerate(order)}
    nodes = tuple(
        transplanted(node, index, lambda ref: Ref(place[ref.node], ref.output))
        for index, node in enumerate(order)
    )
    return replace(graph, nodes=nodes, second_part=sum(not is_second(n) for n in graph.nodes))
