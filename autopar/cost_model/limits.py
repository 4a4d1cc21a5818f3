"""Constraints in force: which choices of a class, which states and which steps they leave.

They only take away. A class of nodes takes one decision, so a constraint that speaks of some of its
nodes must speak of all. Ops and saved activations that cannot be what is wanted, since they lack
the dim or its size does not divide, are left open; anything else that cannot is an error.
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
"""Whether a class may decide so, with what that makes of its inputs and outputs."""

Leads = Callable[[Sharding, Sharding], bool]
"""Whether a tensor may go from one state to another."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """What `constraint` says of the choices of a class. One that is `lenient` says nothing of a
    class of which no choice passes that what stands before it allows."""

    constraint: Constraint
    passes: Passes
    lenient: bool = False


Rules = dict[str, list[LimitRule]]
Arcs = dict[tuple[str, int], list[tuple[Phase | None, Leads]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """`choices` has the rules on classes, by key; `storages` what classes of parameters may choose
    from, where a constraint speaks of it; `saved` what is asked of saved activations (`root_key`).
    `arcs` has the steps that outputs of classes may take, in one phase or in both."""

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
        """`entry` with the choices that every rule on it allows. InfeasibleError, naming what of
        the user's leaves none, of which nothing could be spared."""
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
        """The `states` of an activation of class `key` that it may be saved in."""
        tests: Tests = self.saved.get(key, ())
        for test in tests:
            left = tuple(s for s in states if holds(test, tensor, self.batch, s))
            states = left or states
        return states

    def arc_costs(self, group: Group, network: Network, costs: IntArray) -> IntArray:
        """`costs` of the arcs of `network`, those `FORBIDDEN` that must not be taken."""
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
    """A class, for people."""
    node = entry.node
    name = node.target or node.module
    name = general(name) if entry.count > 1 else name
    kind = node.op if node.role is Role.OP else node.role.value
    return f"{kind}{' in' * (node.role is Role.OP and bool(name))} {name}".rstrip()


def _options(entry: NodeClass) -> list[str]:
    """What the class could be, apart from constraints: of an op the options on an axis."""
    options: dict[str, None] = {}
    for choice in entry.choices:
        if isinstance(choice, Choice):
            options |= dict.fromkeys(choice.options)
        else:
            options[str(choice.storage if isinstance(choice, ParamChoice) else choice)] = None
    return list(options)


def _passing(entry: NodeClass, rules: Sequence[LimitRule]) -> frozenset[int]:
    """The choices that rules of one origin allow. One that is lenient gives way to those before
    it."""
    left = frozenset(range(len(entry.choices)))
    for rule in rules:
        passed = frozenset(
            c for c in left if rule.passes(entry.choices[c], entry.inputs[c], entry.outputs[c])
        )
        left = left if rule.lenient and not passed else passed
    return left


def _of_origin(origin: str, rules: Sequence[LimitRule]) -> str:
    """What the user wrote, and what a strategy comes to here."""
    if not origin.startswith("strategy "):
        return origin
    return f"{origin} ({' and '.join(dict.fromkeys(str(rule.constraint) for rule in rules))})"


# In what shards a parameter may lie when some of it is given, and not for the planner to choose.
#
# What is given is what DTensor's `Shard(dim)` means: what was `S(0)` in one graph of a model is
# `C(0)` in another one where dim 0 is made of other parts, and means the same pieces.


def storages(
    tensor: TensorType, atoms: Sequence[Atom], mesh: Mesh, tests: Sequence[Test]
) -> tuple[Sharding, ...]:
    """Every storage of `tensor` that meets `tests`, in canonical order. Chunks that may be uneven
    are offered of the dims that are asked for; where none is, of the dim that is chunked anyway,
    or else, if nothing is left, of any."""
    per_axis = [_dims(tensor, [t for t in tests if t.axis == k]) for k in range(len(mesh.axes))]
    states = dict.fromkeys(stored(tensor, atoms, dims, mesh.sizes) for dims in product(*per_axis))
    legal = [s for s in states if is_legal(tensor, atoms, s, mesh.sizes)]
    requested = {p.dim for t in tests if not t.excluded and (p := t.placement) and p.kind in "SC"}
    offered = requested or {chunkable_dim(tensor, mesh.sizes)}
    usual = [s for s in legal if not chunked_axes(s) or chunked_dim(s) in offered]
    return tuple(usual or legal)


def _dims(tensor: TensorType, tests: Sequence[Test]) -> list[int | None]:
    """The dims that one axis may cut, None for none of them."""
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
