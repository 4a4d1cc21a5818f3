"""The roles of dims in matmuls, from the graph alone: the batch, and the input and output features
of weights.

A matmul with a weight sums over a dim that the weight shares with another input. In forward that
dim is the weight's input features, and its other dim the output features. In backward, the gradient
of the input is a sum over the output features, and the gradient of the weight a sum over all else.
Casts and views of a weight, and of its gradient, stand for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Factor, Graph, Node, Phase, Ref, Role, Slot, per_graph

IN, OUT = "in", "out"

Slots = Mapping[Slot, Slot]
"""Slots of a tensor to the slots of its parameter."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is parameter `name` in another shape or dtype, or the gradient of it."""

    name: str
    slots: Slots


@dataclass(frozen=True, slots=True)
class MatmulRoles:
    """`roles[key][factor]` is `IN` or `OUT` for the factors of matmuls that are features of a
    weight; `weights[name][slot]` the same for the dims of weights. `derived` has the names of the
    tensors that are parameters in another shape or dtype. `casts` are the ops that make these, or
    turn one form of a gradient into another."""

    roles: Mapping[str, Mapping[str, str]]
    weights: Mapping[str, Mapping[Slot, str]]
    derived: Mapping[Ref, str]
    casts: frozenset[int]


@per_graph
def batch_atoms(graph: Graph) -> frozenset[int]:
    """The atoms that count samples: those that lead dim 0 of an input and are nowhere else in any
    input. Inputs of one dim count only if there are no others."""
    types = [node.outputs[0] for node in graph.with_role(Role.INPUT)]
    several = [tensor for tensor in types if len(tensor.shape) > 1] or types
    leading = {tensor.parts[0][0] for tensor in several if tensor.shape and tensor.parts[0]}
    others = {atom for t in types for (slot, atom) in t.slots() if slot != (0, 0)}
    return frozenset(leading - others)


@per_graph
def find_matmuls(graph: Graph) -> MatmulRoles:
    """The matmuls with weights of a graph."""
    derived = _derived(graph)
    weights: dict[str, dict[Slot, str]] = {}
    for node in _contractions(graph, Phase.FORWARD):
        features = tuple(_features(node, derived))
        if any(_is_summed(node, factor) for _, factor, _ in features):
            for weight, factor, slot in features:
                role = IN if _is_summed(node, factor) else OUT
                weights.setdefault(weight.name, {}).setdefault(weight.slots[slot], role)
    gradients = _gradients(graph)
    roles: dict[str, dict[str, str]] = {}
    for node in _contractions(graph, Phase.FORWARD, Phase.BACKWARD):
        factor_roles = {
            factor.name: weights[weight.name][weight.slots[slot]]
            for weight, factor, slot in _features(node, derived)
            if weight.slots[slot] in weights.get(weight.name, {})
        } or _output_features(node, gradients, weights)
        if factor_roles:
            roles.setdefault(node.key, factor_roles)
    names = {ref: weight.name for ref, weight in derived.items()}
    joined = (
        ref.node
        for ref in gradients
        if any(read in gradients for read in graph.nodes[ref.node].inputs)
    )
    return MatmulRoles(roles, weights, names, frozenset((*(ref.node for ref in names), *joined)))


def _contractions(graph: Graph, *phases: Phase) -> Iterator[Node]:
    for node in graph.with_role(Role.OP):
        if node.phase in phases and any(
            sum(slot is not None for slot in f.inputs) > 1 and _is_summed(node, f)
            for f in node.factors
        ):
            yield node


def _is_summed(node: Node, factor: Factor) -> bool:
    return not factor.members and any(slot is None for slot in factor.outputs)


def _features(node: Node, derived: Mapping[Ref, Weight]) -> Iterator[tuple[Weight, Factor, Slot]]:
    """(weight, factor, slot) of every dim of a weight that `node` multiplies with a tensor that is
    no weight."""
    weights = [(i, derived[ref]) for i, ref in enumerate(node.inputs) if ref in derived]
    if len(weights) == len(node.inputs):
        return
    for i, weight in weights:
        used = [(f, slot) for f in node.factors if (slot := f.inputs[i]) in weight.slots]
        if len(weight.slots) > 1:
            yield from ((weight, f, slot) for f, slot in used if slot is not None)


def _output_features(
    node: Node,
    gradients: Mapping[Ref, Weight],
    weights: Mapping[str, Mapping[Slot, str]],
) -> dict[str, str]:
    """The roles of the factors of a matmul that makes the gradient of a weight."""
    roles: dict[str, str] = {}
    for output in range(len(node.outputs)):
        weight = gradients.get(Ref(node.index, output))
        if weight is None or weight.name not in weights:
            continue
        for factor in node.factors:
            slot = factor.outputs[output]
            if slot is not None and slot in weight.slots:
                role = weights[weight.name].get(weight.slots[slot])
                roles |= {} if role is None else {factor.name: role}
    return roles


def _derived(graph: Graph) -> dict[Ref, Weight]:
    """Every tensor that is a parameter, a view or a cast of one."""
    weights: dict[Ref, Weight] = {}
    for node in graph.nodes:
        if node.role is Role.PARAM:
            slots = {slot: slot for slot, _ in node.outputs[0].slots()}
            weights[Ref(node.index)] = Weight(node.target, slots)
        elif node.role is Role.OP and len(node.inputs) == 1 and node.inputs[0] in weights:
            weight = weights[node.inputs[0]]
            moved = _moved(node, weight.slots, lambda f: (f.inputs[0], f.outputs[0]))
            if moved is not None:
                weights[Ref(node.index)] = Weight(weight.name, moved)
    return weights


def _gradients(graph: Graph) -> dict[Ref, Weight]:
    """Every tensor that becomes a parameter's gradient by views, casts and sums of several."""
    weights: dict[Ref, Weight] = {}
    for node in reversed(graph.nodes):
        if node.role is Role.GRAD:
            slots = {slot: slot for slot, _ in graph.type_of(node.inputs[0]).slots()}
            weights.setdefault(node.inputs[0], Weight(node.target, slots))
        weight = weights.get(Ref(node.index))
        if weight is None or node.role is not Role.OP or node.phase is not Phase.BACKWARD:
            continue
        for i, ref in enumerate(node.inputs):
            moved = _moved(node, weight.slots, lambda f, i=i: (f.outputs[0], f.inputs[i]))
            if moved is not None:
                weights.setdefault(ref, Weight(weight.name, moved))
    return weights


def _moved(
    node: Node, slots: Slots, ends: Callable[[Factor], tuple[Slot | None, Slot | None]]
) -> Slots | None:
    """`slots` on the other side of an op that neither adds dims nor takes any away; None for
    others. `ends` are (this side, the other side) of a factor."""
    moved: dict[Slot, Slot] = {}
    for factor in node.factors:
        here, there = ends(factor)
        if factor.members or here is None or there is None:
            return None
        if here in slots:
            moved[there] = slots[here]
    return moved if len(moved) == len(slots) else None
