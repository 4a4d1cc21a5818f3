"""Which activations may be saved in fewer bits.

Those that the model computes in float32 of its inputs and its parameters. Not statistics, of which
there is one for many elements, whose error would be that of all of them: what an op sums up, what
it gives beside its first output, and what is computed of such alone. Not what stands in an
exponent in backward. Nor masks, noise and tables, which know nothing of inputs and parameters, nor
what is computed of parameters alone.
"""

from __future__ import annotations

from math import prod

from autopar.ir.graph import Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.stages import RECEIVE
from autopar.rules.table import record_of
from autopar.rules.work import is_contraction

DTYPE = "float32"


@per_graph
def roundable(graph: Graph) -> frozenset[Ref]:
    """Those of `graph`, each the first output of an op of forward."""
    given, trained, statistics = set[int](), set[int](), set[int]()
    found = set[Ref]()
    for node in graph.nodes:
        sources = {ref.node for ref in node.inputs}
        if node.role is Role.INPUT or node.op == RECEIVE or sources & given:
            given.add(node.index)
        if node.role is Role.PARAM or node.op == RECEIVE or sources & trained:
            trained.add(node.index)
        if node.role is not Role.OP or node.phase is not Phase.FORWARD:
            continue
        if _is_statistic(graph, node, given & trained, statistics):
            statistics.add(node.index)
        elif node.index in given & trained and _is_activation(node):
            found.add(Ref(node.index))
    return frozenset(found)


def _is_activation(node: Node) -> bool:
    """Whether an op makes a tensor of which each element is one of many."""
    is_made_here = not (node.view or node.random or node.op == RECEIVE)
    tensor = node.outputs[0] if node.outputs else None
    if not is_made_here or tensor is None or record_of(node.op).exponent:
        return False
    return tensor.dtype == DTYPE and prod(tensor.shape) > 1


def _is_statistic(graph: Graph, node: Node, activations: set[int], known: set[int]) -> bool:
    """Whether an op sums something up that it has no other dims for, or sees `known` statistics
    alone."""
    if node.view:
        source = node.inputs[0]
        return source.node in known or bool(source.output and not graph.nodes[source.node].view)
    if is_contraction(node.op) or record_of(node.op).lookup:
        return False
    factors = [factor for factor in node.factors if not factor.members]
    dropped = any(any(f.inputs) and f.outputs and f.outputs[0] is None for f in factors)
    others = any(f.outputs and f.outputs[0] is not None and not any(f.inputs) for f in factors)
    read = [ref.node for ref in node.inputs if ref.node in activations]
    return (dropped and not others) or (bool(read) and all(place in known for place in read))
