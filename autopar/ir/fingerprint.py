"""A short text that two graphs share exactly if a plan for one is a plan for the other."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from autopar.ir.graph import Arg, Factor, FactorType, Graph, Node, Ref, TensorType, per_graph

_DIGEST_BYTES = 16


@per_graph
def fingerprint(graph: Graph) -> str:
    """Hexadecimal BLAKE2b of the graph's ops, arguments, types, keys and factors. The names of the
    graph, of its nodes and of its atoms, and source lines, do not count."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for line in canonical_lines(graph):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def canonical_lines(graph: Graph) -> Iterator[str]:
    """What a fingerprint is made of: one line per atom, then one per node."""
    for atom in graph.atoms:
        yield f"atom {atom.size} {int(atom.in_param)}"
    # Nodes of equal blocks share their factors and types.
    written: dict[int, str] = {}
    for node in graph.nodes:
        yield _node(node, written)


def _node(node: Node, written: dict[int, str]) -> str:
    kwargs = ", ".join(f"{name}={_arg(value)}" for name, value in node.kwargs)
    if id(node.factors) not in written:
        written[id(node.factors)] = "; ".join(map(_factor, node.factors))
    if id(node.outputs) not in written:
        written[id(node.outputs)] = ", ".join(map(_tensor, node.outputs))
    factors, outputs = written[id(node.factors)], written[id(node.outputs)]
    flags = (
        f"{node.partial} {_flags(node.mean, node.view, node.has_rule)}{node.input_sharding or ''}"
    )
    return (
        f"{node.key} | {node.role.value} {node.phase.value} {node.target} | {node.op}"
        f"({_arg(node.args)}; {kwargs}) -> {outputs} | {factors} | {flags}"
    )


def _factor(factor: Factor) -> str:
    flags = _flags(factor.whole, factor.exchanged, factor.type is FactorType.PERMUTATION)
    members = " ".join(factor.members)
    return f"{factor.name} {factor.atom} {factor.inputs} {factor.outputs} {flags}{members}"


def _flags(*flags: bool) -> str:
    return "".join(str(int(flag)) for flag in flags)


def _tensor(tensor: TensorType) -> str:
    return f"{tensor.dtype}{tensor.shape}{tensor.parts}"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.node}.{arg.output}"
    if isinstance(arg, tuple):
        return "(" + " ".join(map(_arg, arg)) + ")"
    return repr(arg)
