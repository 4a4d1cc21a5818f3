"""Constraints in force: the choices of a class, the shardings and the steps that they leave.

Constraints only take choices away. A class of nodes takes one decision, so a constraint on some of
its nodes must cover all of them. Some ops and saved activations cannot meet a constraint, as they
lack the dim or its size does not divide: those are left open. Anything else that cannot is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from autopar.errors import InfeasibleError
from autopar.ir.choices import Choice, Decision, ParamChoice
from autopar.ir.graph import Atom, Graph, Phase, Role, TensorType
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.problem import FORBIDDEN, IntArray
from autopar.ir.redistribute import is_legal
from autopar.ir.sharding import Sharding
from autopar.ir.uneven import chunkable_dim, chunked_axes, chunked_dim, stored
from autopar.ir.uses import Group
from autopar.plans.requests.constraints import Constraint, Test, Tests, holds
from autopar.plans.requests.matching import general

if TYPE_CHECKING:
    from autopar.cost_model.network import Network
    from autopar.cost_model.space import NodeClass

_SHOWN = 8

Shardings = Sequence[Sharding]

Passes = Callable[[Decision, Shardings, Shardings], bool]
"""Whether a class may take a decision, with the shardings of its inputs and outputs."""

Leads = Callable[[Sharding, Sharding], bool]
"""Whether a tensor may be redistributed from one sharding to another."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """`constraint` on the choices of a class, which must pass `passes`. A `lenient` rule is ignored
    where it leaves none of the choices that the rules before it allow."""

    constraint: Constraint
    passes: Passes
    lenient: bool = False


Rules = dict[str, list[LimitRule]]
Arcs = dict[tuple[str, int], list[tuple[Phase | None, Leads]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """All constraints on one mesh. `choices` has the rules on classes, by key. `storages` has the
    allowed storages of constrained classes of parameters. `saved` has the tests of saved
    activations, by `root_key`. `arcs` has the steps that outputs of classes may take, in one phase
    or in both."""

    graph: Graph
    mesh: Mesh
    batch: frozenset[int] = frozenset()
    choices: Rules = field(default_factory=Rules)
    storages: Mapping[str, tuple[Sharding, ...]] = field(
        default_factory=dict[str, tuple[Sharding, ...]]
    )
    saved: Mapping[str, Tests] = field(default_factory=dict[str, Tests])
    arcs: Arcs = field(default_factory=Arcs)

    def filtered(self, entry: NodeClass) -> NodeClass:
        """`entry` with the choices that every rule on it allows. InfeasibleError if none is left:
        it names constraints that leave none together, all of which are needed for that."""
        on_it = self.choices.get(entry.key, ())
        rules = grouped((rule.constraint.origin, rule) for rule in on_it)
        passing = {origin: _passing(entry, some) for origin, some in rules.items()}
        numbers = frozenset(range(len(entry.choices)))
        left = numbers.intersection(*passing.values())
        if numbers and not left:
            raise InfeasibleError(self._clash(entry, rules, passing))
        return entry.taking(sorted(left)) if left < numbers else entry

    def _clash(
        self,
        entry: NodeClass,
        rules: Mapping[str, Sequence[LimitRule]],
        passing: Mapping[str, frozenset[int]],
    ) -> str:
        numbers, needed = frozenset(range(len(entry.choices))), dict(passing)
        for origin in passing:
            others = [passed for other, passed in needed.items() if other != origin]
            if not numbers.intersection(*others):
                del needed[origin]
        options = _options(entry)
        shown = ", ".join(options[:_SHOWN]) + ", ..." * (len(options) > _SHOWN)
        reasons = "; ".join(_of_origin(origin, rules[origin]) for origin in needed)
        return (
            f"{reasons}: nothing is left to {_describe(entry)} on mesh "
            f"{self.mesh or 'of one device'}, which could be {shown}"
        )

    def saved_states(
        self, key: str, tensor: TensorType, states: tuple[Sharding, ...]
    ) -> tuple[Sharding, ...]:
        """Those of `states` that an activation of class `key` may be saved in."""
        tests: Tests = self.saved.get(key, ())
        for test in tests:
            left = tuple(s for s in states if holds(test, tensor, self.batch, s))
            states = left or states
        return states

    def arc_costs(self, group: Group, network: Network, costs: IntArray) -> IntArray:
        """`costs` of the arcs of `network`, `FORBIDDEN` for arcs that no rule allows."""
        arcs = self.arcs.get((self.graph.nodes[group.root.node].key, group.root.output), ())
        rules = [leads for phase, leads in arcs if phase in (None, group.phase)]
        if not rules:
            return costs
        states = network.states
        tails: list[int] = network.tails.tolist()
        heads: list[int] = network.heads.tolist()
        allowed = [
            all(leads(states[t], states[h]) for leads in rules)
            for t, h in zip(tails, heads, strict=True)
        ]
        return np.where(np.array(allowed, bool), costs, FORBIDDEN)


def _describe(entry: NodeClass) -> str:
    """The name of a class in messages."""
    node = entry.node
    name = node.target or node.module
    name = general(name) if entry.count > 1 else name
    kind = node.op if node.role is Role.OP else node.role.value
    return f"{kind}{' in' * (node.role is Role.OP and bool(name))} {name}".rstrip()


def _options(entry: NodeClass) -> list[str]:
    """The choices of a class without constraints; for an op, its options on an axis."""
    options: dict[str, None] = {}
    for choice in entry.choices:
        if isinstance(choice, Choice):
            options |= dict.fromkeys(choice.options)
        else:
            options[str(choice.storage if isinstance(choice, ParamChoice) else choice)] = None
    return list(options)


def _passing(entry: NodeClass, rules: Sequence[LimitRule]) -> frozenset[int]:
    """The choices that rules of one origin allow, without lenient rules that would leave none."""
    left = frozenset(range(len(entry.choices)))
    for rule in rules:
        passed = frozenset(
            c for c in left if rule.passes(entry.choices[c], entry.inputs[c], entry.outputs[c])
        )
        left = left if rule.lenient and not passed else passed
    return left


def _of_origin(origin: str, rules: Sequence[LimitRule]) -> str:
    """The constraint as the user wrote it; a strategy with the constraints that it stands for."""
    if not origin.startswith("strategy "):
        return origin
    return f"{origin} ({' and '.join(dict.fromkeys(str(rule.constraint) for rule in rules))})"


# The storages of a parameter that constraints leave.
#
# A given dim means DTensor's `Shard(dim)`. It may be `S(0)` in one graph of a model and `C(0)` in
# another one, where dim 0 is made of other parts: both are the same shards.


def storages(
    tensor: TensorType, atoms: Sequence[Atom], mesh: Mesh, tests: Sequence[Test]
) -> tuple[Sharding, ...]:
    """Every storage of `tensor` that meets `tests`, in canonical order. The dims in `tests` may be
    cut into uneven chunks. Without such a dim, the one that is chunked by default may be, or any
    dim if nothing else is left."""
    per_axis = [_dims(tensor, [t for t in tests if t.axis == k]) for k in range(len(mesh.axes))]
    states = dict.fromkeys(stored(tensor, atoms, dims, mesh.sizes) for dims in product(*per_axis))
    legal = [s for s in states if is_legal(tensor, atoms, s, mesh.sizes)]
    requested = {p.dim for t in tests if not t.excluded and (p := t.placement) and p.kind in "SC"}
    offered = requested or {chunkable_dim(tensor, mesh.sizes)}
    usual = [s for s in legal if not chunked_axes(s) or chunked_dim(s) in offered]
    return tuple(usual or legal)


def _dims(tensor: TensorType, tests: Sequence[Test]) -> list[int | None]:
    """The dims that one axis may shard, None for none of them."""
    dims: list[int | None] = [None, *range(len(tensor.shape))]
    return [dim for dim in dims if all(_meets(tensor, dim, test) for test in tests)]


def _meets(tensor: TensorType, dim: int | None, test: Test) -> bool:
    if test.what == "unmoved":
        return True
    if test.what == "S":
        is_met = dim is not None or (prod(tensor.shape) == 1 and not test.excluded)
    else:
        placement = test.placement
        given = None if placement is None or placement.kind == "R" else placement.dim
        is_met = dim == given and (placement is None or placement.part == 0)
    return is_met != test.excluded
