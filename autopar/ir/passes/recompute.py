"""What backward recomputes, instead of having it saved by forward: the step as another graph.

An op of forward that is recomputed has a copy in backward, in front of the first op there that
reads its output; all of backward reads the copy's. Inputs of the copy are recomputed too, or saved,
or there anyway, like parameters and inputs of the model. Copies are ops like all others: they are
laid out, priced, scheduled and written as such. They may be computed under another sharding than
their originals.

Whether an op is recomputed is one of the choices of the problem. The problem is stated for a graph
in which everything that can be recomputed has an *optional* copy.

Some activations are always saved. Random numbers are redrawn from the saved state of their
generator (`redrawable`), so that they are the same, but those that depend on tensors of the step
are saved. So are ops that read a buffer which forward changes. The output of a block that the next
one reads is saved too: recomputing it would need all blocks before it, held together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.ir.blocks import place_of
from autopar.ir.casts import casts_of
from autopar.ir.graph import (
    Atom,
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
from autopar.ir.own_ops import CHUNKED, COPY, DRAW, OPTION, RECEIVE, SEND, STATE, with_word
from autopar.ir.uses import root_of

_ONCE = frozenset({SEND, RECEIVE}) | CHUNKED


def with_recompute(graph: Graph, keys: Collection[str] | None) -> Graph:
    """A pass: takes a step, gives the one in which backward recomputes the ops with these `keys`,
    as far as it reads them. Where `keys` is None, every op that can be recomputed, and that
    backward needs, gets an optional copy. All nodes stay, copies are added. ValueError if an op
    cannot be recomputed."""
    possible = _candidates(graph)
    unknown = sorted(set(keys or ()) - possible)
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be recomputed")
    chosen, word = (possible, OPTION) if keys is None else (frozenset(keys), COPY)
    return _Copier(with_states(graph, chosen), chosen, word).run() if chosen else graph


@per_graph
def _candidates(graph: Graph) -> frozenset[str]:
    """The keys of ops of forward of which all can be recomputed. These ops cannot:

    - casts of parameters, which are done where they are read anyway;
    - what another stage sends;
    - a loss in chunks, whose backward recomputes the scores itself;
    - readers of a buffer or parameter that forward changes: backward would read the new value;
    - random numbers that might come out otherwise (`redrawable`);
    - outputs of one block that another reads."""
    copies, nodes = casts_of(graph).copies, graph.nodes
    changed = {node.target for node in graph.with_role(Role.MUTATION, Role.UPDATE)}
    keys, ruled_out = set[str](), set[str]()
    for node in graph.with_role(Role.OP):
        if node.view or f":{Phase.FORWARD.value}:" not in node.key:
            continue
        is_drawn_once = node.random and node.index not in redrawable(graph)
        is_excluded = is_drawn_once or node.op in _ONCE or node.index in copies
        (ruled_out if is_excluded else keys).add(node.key)
        for ref in node.inputs:
            maker = nodes[root_of(graph, ref)[0].node]
            if maker.role in (Role.BUFFER, Role.PARAM) and maker.target in changed:
                ruled_out.add(node.key)
            if place_of(maker.module) != place_of(node.module):
                ruled_out.add(maker.key)
    return frozenset(keys - ruled_out)


@per_graph
def as_written(graph: Graph) -> tuple[str, ...]:
    """The keys of ops that backward recomputes because the model wraps them in
    `torch.utils.checkpoint`: the classes that can be recomputed, whose every op is in a checkpoint,
    and that backward needs."""
    members = grouped(
        (node.key, node)
        for node in graph.with_role(Role.OP)
        if node.key in _candidates(graph) and node.phase is Phase.FORWARD
    )
    written = {k for k, nodes in members.items() if all(n.checkpoint == "whole" for n in nodes)}
    copied = {node.key for node in with_recompute(graph, written).nodes}
    return tuple(sorted(key for key in written if with_word(key, COPY) in copied))


class _Copier:
    def __init__(self, graph: Graph, keys: frozenset[str], word: str) -> None:
        self.graph, self.word = graph, word
        self.nodes: list[Node] = []
        self.place: dict[int, int] = {}
        """The new index of each node."""
        self.copied: dict[int, int] = {}
        """The index of each node's copy."""
        self.chosen: set[int] = set()
        for node in graph.nodes:
            recomputed = node.inputs[0].node in self.chosen if node.view else node.key in keys
            if recomputed and node.role is Role.OP and node.phase is Phase.FORWARD:
                self.chosen.add(node.index)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            reads_copies = node.phase is Phase.BACKWARD
            if reads_copies:
                self._copy_for(node)
            self.place[node.index] = self._put(node, self.copied if reads_copies else {})
        return replace(self.graph, nodes=tuple(self.nodes))

    def _copy_for(self, reader: Node) -> None:
        """Add copies of all recomputed ops that `reader` needs, in the order of the graph."""
        missing, needed = [reader.index], set[int]()
        while missing:
            for ref in self.graph.nodes[missing.pop()].inputs:
                is_known = ref.node in self.copied or ref.node in needed
                if ref.node in self.chosen and not is_known:
                    needed.add(ref.node)
                    missing.append(ref.node)
        for index in sorted(needed):
            node = self.graph.nodes[index]
            copy = replace(node, phase=Phase.BACKWARD, key=with_word(node.key, self.word))
            self.copied[index] = self._put(copy, self.copied)

    def _put(self, node: Node, copied: dict[int, int]) -> int:
        """Add a node, which reads copies where there are any. Returns its index."""

        def ref(old: Ref) -> Ref:
            return Ref(copied.get(old.node, self.place[old.node]), old.output)

        index = len(self.nodes)
        self.nodes.append(transplanted(node, index, ref))
        return index


# Random numbers that backward redraws: the step with the states of its generator.
#
# An op that draws random numbers is a function of its inputs and of the state of the generator,
# which it changes. Here the state becomes a tensor of the step: `STATE`, in front of the op, is the
# generator's state, and `DRAW` is the op, which reads it. So a copy of a `DRAW` in backward is one
# like any other: it reads the state, which was saved as activations are, and draws the same
# numbers. It leaves the generator as it was.
#
# A state is at most as large as that of a CPU's generator; a GPU's is smaller, and on the host.

STATE_BYTES = 5056
"""The bytes of the state of torch's generator on a CPU, a Mersenne Twister."""


@per_graph
def redrawable(graph: Graph) -> frozenset[int]:
    """The ops that may be redrawn: those that depend on no tensor of the step. Others depend on
    tensors that backward may compute otherwise, and one bit of a probability decides another
    number. Ops with a generator of the model's own are left out: its state is unknown."""
    independent, drawable = set[int](), set[int]()
    for node in graph.nodes:
        if node.role is not Role.OP or node.op == RECEIVE:
            continue
        if all(ref.node in independent for ref in node.inputs):
            independent.add(node.index)
            if node.random and node.has_rule and dict(node.kwargs).get("generator") is None:
                drawable.add(node.index)
    return frozenset(drawable)


def with_states(graph: Graph, keys: Collection[str]) -> Graph:
    """`graph`, in which ops with these keys that may be redrawn are `DRAW`s, each behind its
    `STATE`; `graph` itself if there are none."""
    drawn = {index for index in redrawable(graph) if graph.nodes[index].key in keys}
    if not drawn:
        return graph
    atoms = (*graph.atoms, Atom(STATE_BYTES, "random state", in_param=False))
    kind = TensorType("uint8", (STATE_BYTES,), ((len(graph.atoms),),))
    nodes: list[Node] = []
    place: dict[int, int] = {}
    for node in graph.nodes:
        copy = transplanted(node, len(nodes), lambda ref: Ref(place[ref.node], ref.output))
        if node.index in drawn:
            nodes.append(_state_of(node, len(nodes), kind))
            copy = _draw_with(copy, Ref(len(nodes) - 1))
        place[node.index] = copy.index
        nodes.append(copy)
    return replace(graph, nodes=tuple(nodes), atoms=atoms)


def _state_of(node: Node, index: int, kind: TensorType) -> Node:
    """The node of the generator's state that `node` draws from."""
    return Node(
        index,
        f"{node.name}_state",
        STATE,
        Role.OP,
        node.phase,
        outputs=(kind,),
        module=node.module,
        key=state_key(node.key),
        source_line=node.source_line,
        checkpoint=node.checkpoint,
    )


def state_key(key: str) -> str:
    """The key of the states of draws that have `key`.

    >>> state_key("layers.*.drop:forward:native_dropout.0")
    'layers.*.drop:forward:random_state.native_dropout.0'
    """
    place, _, op = key.rpartition(":")
    return f"{place}:random_state.{op}"


def _draw_with(node: Node, state: Ref) -> Node:
    """`node` as a `DRAW` from `state`, its last input, which no factor shards."""
    return replace(
        node,
        index=node.index + 1,
        op=DRAW,
        args=(node.op, *node.args, state),
        inputs=(*node.inputs, state),
        factors=tuple(replace(f, inputs=(*f.inputs, None)) for f in node.factors),
    )
