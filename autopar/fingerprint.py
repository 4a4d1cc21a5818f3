"""A short text that two graphs share exactly if a plan for one is a plan for the other."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from autopar.graph import Arg, Graph, Node, Ref, TensorType

_DIGEST_BYTES = 16


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
    for node in graph.nodes:
        yield _node(node)


def _node(node: Node) -> str:
    kwargs = ", ".join(f"{name}={_arg(value)}" for name, value in node.kwargs)
    factors = "; ".join(
        f"{f.name} {f.atom} {f.inputs} {f.outputs} {_flags(f.whole, f.exchanged, f.complete)}"
        f"{' '.join(f.members)}"
        for f in node.factors
    )
    outputs = ", ".join(map(_tensor, node.outputs))
    flags = f"{node.partial} {_flags(node.mean, node.view, node.has_rule)}{node.handed}"
    return (
        f"{node.key} | {node.role.value} {node.phase.value} {node.target} | {node.op}"
        f"({_arg(node.args)}; {kwargs}) -> {outputs} | {factors} | {flags}"
    )


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
