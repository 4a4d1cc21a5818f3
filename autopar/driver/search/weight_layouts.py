"""What kind of parallelism the weights of a plan follow, and which plans follow another.

On each mesh axis a class of weights plays one role:

* `WHOLE`: every rank stores it and computes with all of it;
* `GATHERED`: it is stored in shards and gathered to compute (ZeRO, FSDP). Which dim is sharded
  makes almost no difference to the step, and does not count;
* `COLUMN` and `ROW`: each rank computes with a shard, of output or of input features;
* `S(d)`: the same, of dim d, for a weight of an op that is no matmul, such as the table of an
  embedding.

What a rank computes with follows from the matmul that takes the weight, or from the first op that
does if none is a matmul. Neighbouring axes of one role count as one axis, so that meshes compare.

Two plans differ in structure if weights with at least `ENOUGH` of the model's parameter bytes play
another role on some axis. Less is not another plan: whether one small projection is gathered or
replicated is worth some thousandths of a step, whatever the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from math import prod

import numpy as np

from autopar.ir.choices import Choice, ParamChoice, shardings
from autopar.ir.contractions import IN, MatmulRoles, find_matmuls
from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.ir.grouping import grouped
from autopar.ir.problem import FORBIDDEN, BoolArray, Edge, Label, Problem, Usage
from autopar.plans.requests.matching import general

ENOUGH = Fraction(1, 4)
"""The share of the model's parameter bytes whose roles differ where plans differ in structure."""

_COUNTED = Fraction(99, 100)
"""The share of parameter bytes whose roles are looked at, the largest classes first."""

WHOLE, GATHERED, COLUMN, ROW = "replicated", "gathered", "by columns", "by rows"

SAME = "same"
_DIFFERENCES = (SAME, "another choice of the op", "another storage")


@dataclass(frozen=True, slots=True)
class Weights:
    """A class of weights: its name with stars for numbers, the key of its parameters, and of the op
    that computes with them. `taken[choice]` has, per mesh axis, the role that a choice of that op
    gives; empty where the storage decides."""

    name: str
    num_bytes: int
    key: str
    op: str
    taken: Mapping[Label, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles that choices of a problem give the weights of its graph, `total_bytes` of them."""

    classes: tuple[Weights, ...]
    total_bytes: int

    def of(self, problem: Problem, choice: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Per class, the role on each mesh axis, in a plan of `problem`."""
        roles: list[tuple[str, ...]] = []
        for weights in self.classes:
            param, op = (problem.keys.index(key) for key in (weights.key, weights.op))
            stored = _stored(problem.labels[param][choice[param]])
            taken = weights.taken[problem.labels[op][choice[op]]]
            roles.append(tuple(t or s for s, t in zip(stored, taken, strict=True)))
        return tuple(roles)

    def elsewhere(self, problem: Problem, chosen: Sequence[Sequence[str]]) -> Problem | None:
        """The problem of the best plan that differs in structure from one with the roles `chosen`.
        It is `problem` with one more node for each class. None if no plan differs.

        Such a node is `SAME`, or says that the op's choice, or the parameters' storage, differs. If
        it is `SAME`, it holds the bytes of its class at a time of its own. The limit at that time
        is such that classes with enough bytes differ. `problem` must have a limit.
        """
        limit = problem.usage_limit
        assert limit is not None
        least = int(ENOUGH * self.total_bytes)
        # A class that is enough by itself counts no more than that: the relaxation is tighter.
        sizes = [min(weights.num_bytes, least) for weights in self.classes]
        room = sum(sizes) - least
        if room < 0:
            return None
        after = max(usage.stop for usages in problem.usages for usage in usages)
        edges = list(problem.edges)
        costs, usages = list(problem.costs), list(problem.usages)
        for place, (weights, roles, size) in enumerate(
            zip(self.classes, chosen, sizes, strict=True), len(problem.keys)
        ):
            for difference, (key, same) in enumerate(_same(problem, weights, roles), 1):
                cost = np.zeros((len(_DIFFERENCES), len(same)), np.int64)
                cost[difference, same] = FORBIDDEN
                edges.append(Edge(place, problem.keys.index(key), cost))
            held = limit + 1 if size > room else size * limit // room
            costs.append(np.zeros(len(_DIFFERENCES), np.int64))
            usages.append((Usage(after, after + 1, np.array([held, 0, 0])),))
        more = len(self.classes)
        return replace(
            problem,
            keys=(*problem.keys, *(f"role:{weights.key}" for weights in self.classes)),
            labels=(*problem.labels, *(_DIFFERENCES,) * more),
            costs=tuple(costs),
            usages=tuple(usages),
            edges=tuple(edges),
        )


def _same(
    problem: Problem, weights: Weights, roles: Sequence[str]
) -> tuple[tuple[str, BoolArray], ...]:
    """(key, which choices leave the roles as they are) of the op and of the parameters. A class
    with other roles has another choice of at least one."""
    by_op = tuple(role if role not in (WHOLE, GATHERED) else "" for role in roles)
    op = [weights.taken[label] == by_op for label in _labels(problem, weights.op)]
    param = [
        all(taken or stored == role for stored, taken, role in zip(_stored(label), by_op, roles))
        for label in _labels(problem, weights.key)
    ]
    return (weights.op, np.array(op)), (weights.key, np.array(param))


def _labels(problem: Problem, key: str) -> tuple[Label, ...]:
    return problem.labels[problem.keys.index(key)]


def _stored(choice: Label) -> tuple[str, ...]:
    """The role of parameters by their storage, where ops take them whole."""
    assert isinstance(choice, ParamChoice)
    return tuple(WHOLE if p.kind == "R" else GATHERED for p in choice.storage)


def find_roles(graph: Graph, problem: Problem) -> Roles:
    """The roles of the weights of `graph` on the mesh that `problem` was stated for."""
    matmuls = find_matmuls(graph)
    users = _users(graph, matmuls)
    classes: list[Weights] = []
    by_key = grouped((node.key, node) for node in graph.with_role(Role.PARAM))
    sizes = {key: sum(n.outputs[0].num_bytes for n in nodes) for key, nodes in by_key.items()}
    left = total = sum(sizes.values())
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        uses = Counter(users[node.target] for node in by_key[key] if node.target in users)
        if uses and left > (1 - _COUNTED) * total:
            (op, arg), _ = uses.most_common(1)[0]
            user = next(node for node in graph.nodes if node.key == op)
            taken: dict[Label, tuple[str, ...]] = {
                choice: _taken(user, arg, choice, matmuls.roles.get(op, {}))
                for choice in _labels(problem, op)
                if isinstance(choice, Choice)
            }
            name = general(by_key[key][0].target)
            classes.append(Weights(name, sizes[key], key, op, taken))
        left -= sizes[key]
    return Roles(tuple(classes), total)


def signature(roles: Sequence[str], sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(role, ranks) from the slowest axis to the fastest, neighbours of one role joined."""
    pairs = [(role, size) for role, size in zip(roles, sizes, strict=True) if size > 1]
    return tuple(
        (role, prod(size for _, size in some)) for role, some in groupby(pairs, lambda p: p[0])
    )


def describe(
    names: Iterable[str],
    before: Sequence[Sequence[str]],
    after: Sequence[Sequence[str]],
    axes: Sequence[str],
) -> str:
    """How `after` differs from `before`: `a, b: by rows on tp instead of gathered`."""
    changes: dict[str, dict[str, None]] = {}
    for name, old, new in zip(names, before, after, strict=True):
        text = ", ".join(
            f"{theirs} on {axis} instead of {ours}"
            for axis, ours, theirs in zip(axes, old, new, strict=True)
            if ours != theirs
        )
        if text:
            changes.setdefault(text, {})[name] = None
    return "; ".join(f"{', '.join(some)}: {text}" for text, some in changes.items())


def _users(graph: Graph, matmuls: MatmulRoles) -> dict[str, tuple[str, int]]:
    """(key, argument) of the first forward matmul with each weight, or else of the first op."""
    users: dict[str, tuple[str, int]] = {}
    for node in graph.with_role(Role.OP):
        if node.phase is not Phase.FORWARD or node.view or Ref(node.index) in matmuls.derived:
            continue
        for arg, ref in enumerate(node.inputs):
            name = matmuls.derived.get(ref)
            if name is not None:
                first, _ = users.setdefault(name, (node.key, arg))
                if node.key in matmuls.roles and first not in matmuls.roles:
                    users[name] = node.key, arg
    return users


def _taken(node: Node, arg: int, choice: Choice, features: Mapping[str, str]) -> tuple[str, ...]:
    placements = shardings(node, choice)[0][arg]
    return tuple(
        "" if p.kind != "S" else _named(features.get(option), p.dim)
        for option, p in zip(choice.options, placements, strict=True)
    )


def _named(feature: str | None, dim: int) -> str:
    return f"S({dim})" if feature is None else (ROW if feature == IN else COLUMN)
