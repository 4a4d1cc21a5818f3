"""Random numbers that backward draws once more, the very same: the step with the states of its
generator.

An op that draws random numbers is a function of what it is given and of the state of the generator,
which it changes. In the step that is made here the state is there to be read: `STATE`, in front of
the op, is what the generator is in, and `DRAW` is the op, which reads it. So a copy of a `DRAW` in
backward (`again`) is one like any other: it reads the state, which was saved as activations are,
and draws from it what the original drew. It leaves the generator as it finds it.

A state is at most as large as that of a CPU's generator; a GPU's is smaller, and on the host.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.ir.graph import Atom, Graph, Node, Ref, Role, TensorType, per_graph, transplanted
from autopar.ir.stages import RECEIVE

STATE, DRAW = "autopar.random_state.default", "autopar.draw.default"
STATE_BYTES = 5056
"""Of the Mersenne Twister that torch has on a CPU."""


@per_graph
def redrawable(graph: Graph) -> frozenset[int]:
    """The ops that may be drawn again: those that are given nothing but what is made of nothing.
    What others draw depends on tensors that may be computed otherwise in backward, and one bit of a
    probability decides another number. A generator of the model's own is not known here."""
    made_of_nothing, found = set[int](), set[int]()
    for node in graph.nodes:
        if node.role is not Role.OP or node.op == RECEIVE:
            continue
        if all(ref.node in made_of_nothing for ref in node.inputs):
            made_of_nothing.add(node.index)
            if node.random and node.has_rule and dict(node.kwargs).get("generator") is None:
                found.add(node.index)
    return frozenset(found)


def with_states(graph: Graph, keys: Collection[str]) -> Graph:
    """`graph`, in which ops with these keys that may be drawn again are `DRAW`s, each behind its
    `STATE`; `graph` itself if there are none."""
    drawn = {index for index in redrawable(graph) if graph.nodes[index].key in keys}
    if not drawn:
        return graph
    atoms = (*graph.atoms, Atom(STATE_BYTES, "random state", in_param=False))
    kind = TensorType("uint8", (STATE_BYTES,), ((len(graph.atoms),),))
    nodes: list[Node] = []
    place: dict[int, int] = {}
    for node in graph.nodes:
        made = transplanted(node, len(nodes), lambda ref: Ref(place[ref.node], ref.output))
        if node.index in drawn:
            nodes.append(_state(node, len(nodes), kind))
            made = _draw(made, Ref(len(nodes) - 1))
        place[node.index] = made.index
        nodes.append(made)
    return replace(graph, nodes=tuple(nodes), atoms=atoms)


def _state(node: Node, index: int, kind: TensorType) -> Node:
    """What `node` is about to draw from."""
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


def _draw(node: Node, state: Ref) -> Node:
    """`node`, which draws from `state`, its last input. No factor has to do with that."""
    factors = (replace(f, inputs=(*f.inputs, None)) for f in node.factors)
    return replace(
        node,
        index=node.index + 1,
        op=DRAW,
        args=(node.op, *node.args, state),
        inputs=(*node.inputs, state),
        factors=tuple(factors),
    )
