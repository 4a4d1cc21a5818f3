"""Which activations may be saved in fewer bits.

Those that the model computes in float32 of its inputs and its parameters. Not statistics, of which
there is one for many elements, whose error would be that of all of them: what an op sums up, what
it gives beside its first output, and what is computed of such alone. Nor masks, noise and tables,
which know nothing of inputs and parameters, nor what is computed of parameters alone.

Nor what backward must have as forward had it (`exact_keys`): what stands in an exponent there,
beside a statistic that is exact, and that by which an op decides, as it did in forward.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from autopar.ir.copies import original_key
from autopar.ir.graph import Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.stages import RECEIVE
from autopar.rules.table import record_of
from autopar.rules.work import is_contraction

DTYPE = "float32"


def roundable(graph: Graph, exact: Collection[str]) -> frozenset[Ref]:
    """Those of `graph`, each the first output of an op of forward that has none of the keys that
    are `exact`."""
    nodes = graph.nodes
    return frozenset(ref for ref in _activations(graph) if nodes[ref.node].key not in exact)


@per_graph
def exact_keys(graph: Graph) -> frozenset[str]:
    """The keys of ops of forward some of whose results backward must have as they are: an op that
    is `exact` reads them there, through views and all that backward computes on the way, or makes
    again, or may."""
    wanted, found = set[int](), set[str]()
    for node in reversed(graph.nodes):
        if node.role is not Role.OP:
            continue
        if node.index in wanted and not node.view:
            # An optional copy stands for its original, which is saved where there is no copy.
            found.add(original_key(node.key))
        if node.phase is Phase.BACKWARD:
            passed = node.inputs if node.index in wanted else _exact_inputs(graph, node)
            wanted.update(ref.node for ref in passed)
        elif node.index in wanted and node.view:
            wanted.update(ref.node for ref in node.inputs)
    return frozenset(found)


def _exact_inputs(graph: Graph, node: Node) -> tuple[Ref, ...]:
    """What its record says; all inputs of an op that makes integers or truth values of numbers."""
    exact = record_of(node.op).exact
    if exact is True or (not node.view and _decides(graph, node)):
        return node.inputs
    return tuple(node.inputs[at] for at in exact or () if at < len(node.inputs))


def _decides(graph: Graph, node: Node) -> bool:
    def is_real(dtype: str) -> bool:
        return dtype.startswith(("float", "bfloat", "complex"))

    reads_real = any(is_real(graph.type_of(ref).dtype) for ref in node.inputs)
    return reads_real and not all(is_real(each.dtype) for each in node.outputs)


@per_graph
def _activations(graph: Graph) -> frozenset[Ref]:
    """The first outputs of ops of forward that are activations."""
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
    if not is_made_here or tensor is None:
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
