"""What the rules of ops say, written into a graph: factors, partial inputs, views, atoms."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import count

from autopar.errors import TraceError, UnknownOpWarning
from autopar.ir.graph import Graph, Node, Ref, Role, given_refs
from autopar.ir.grouping import grouped
from autopar.rules.notation import Call, Rule, TensorShape
from autopar.rules.table import rule_for
from autopar.tracer.atoms import with_atoms
from autopar.tracer.classes import pattern


def with_rules(graph: Graph) -> Graph:
    """`graph` with atoms and factors. An op without a rule runs replicated (`report_unknown`)."""
    cache: dict[Hashable, Rule | None] = {}
    rules = [_rule(graph, n, cache) if n.role is Role.OP else None for n in graph.nodes]
    nodes = (
        replace(node, has_rule=node.role is not Role.OP or not node.inputs)
        if rule is None
        else replace(node, partial=rule.partial, mean=rule.mean, view=rule.view)
        for node, rule in zip(graph.nodes, rules, strict=True)
    )
    return with_atoms(replace(graph, nodes=tuple(nodes)), rules, _alike(graph))


def _rule(graph: Graph, node: Node, cache: dict[Hashable, Rule | None]) -> Rule | None:
    position = count()
    call = Call(
        node.op,
        *given_refs(node, lambda _: Ref(next(position))),
        tuple(TensorShape(t.shape, t.dtype) for t in graph.input_types(node)),
        tuple(TensorShape(t.shape, t.dtype) for t in node.outputs),
    )
    # 1, 1.0 and True are equal but not the same argument.
    key = (call, repr((call.args, call.kwargs)))
    if key not in cache:
        cache[key] = rule_for(call)
    return cache[key]


def report_unknown(graph: Graph, *, strict: bool) -> None:
    """Warn of ops without a rule; with `strict`, TraceError."""
    unknown = grouped((node.op, node) for node in graph.nodes if not node.has_rule)
    for op, users in unknown.items():
        where = f"in module {users[0].module!r}" if users[0].module else "in the model"
        line = f" ({users[0].source_line})" if users[0].source_line else ""
        times = f"{len(users)} times, first " if len(users) > 1 else ""
        text = (
            f"{op}, used {times}{where}{line}, has no sharding rule and runs replicated on every "
            "rank: describe it in autopar/rules"
        )
        if strict:
            raise TraceError(text)
        warnings.warn(text, UnknownOpWarning, stacklevel=3)


def _alike(graph: Graph) -> Iterator[tuple[Ref, Ref]]:
    """Tensors with the same dims that no op relates: a parameter and its gradient, a buffer and
    its new value, an output and its tangent, and the parameters of equal blocks."""
    holders: dict[tuple[Role, str], Ref] = {}
    classes: dict[object, Ref] = {}
    for node in graph.nodes:
        if node.role in (Role.PARAM, Role.BUFFER, Role.TANGENT):
            holders[node.role, node.target] = Ref(node.index)
        if node.role in (Role.PARAM, Role.BUFFER):
            tensor = node.outputs[0]
            kind = (node.role, pattern(node.target), tensor.shape, tensor.dtype)
            first = classes.setdefault(kind, Ref(node.index))
            if first != Ref(node.index):
                yield first, Ref(node.index)
    partner = {
        Role.GRAD: Role.PARAM,
        Role.MUTATION: Role.BUFFER,
        Role.UPDATE: Role.PARAM,
        Role.LOSS: Role.TANGENT,
        Role.VALUE: Role.TANGENT,
    }
    for node in graph.nodes:
        if node.role in partner:
            holder = holders.get((partner[node.role], node.target))
            if holder is not None:
                yield holder, node.inputs[0]
