"""The torch-free problem that `cost_model` states and `solver` answers.

A `Problem` is a set of nodes, each of which takes exactly one of its choices. Its cost is the sum
of

* `costs[i][c]` for the choice `c` of every node `i`;
* `edge.cost[ci, cj]` for every edge, as in the ASPLOS/EuroSys 2025 contest on intra-operator
  parallelism (several edges between the same pair of nodes add up);
* for every `Flow`, the cheapest set of arcs that leads from the state the source's choice is in to
  every state its sinks ask for. An arc used by several sinks is charged once: a redistribution is
  shared by its consumers, and so are the intermediate steps of it;
* less, for every `Window`, what is hidden in it.

A tensor takes the cheapest path by the costs of arcs alone. Of equally cheap paths it takes any,
also one that hides less.

Memory: during each of its `usages[i]`, node `i` takes bytes by its choice. At every point in time
the sum must be at most `usage_limit`, or the limit in `other_limits` if that time has one. The
memory of a device's host has a time of its own. All figures are integers: a cost that other code
computes from a solution must agree to the last digit. autopar's own problems are in nanoseconds per
training step and in bytes per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from autopar.ir.choices import Decision

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Label = Decision | str
"""What a choice of a node means; of a problem that no graph is behind, a text."""

FORBIDDEN = np.iinfo(np.int64).max // 4
"""A cost at or above this marks a choice, pair or arc that is not allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A cost that depends on the choices of two nodes: `cost[source choice, target choice]`."""

    source: int
    target: int
    cost: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A consumer of a flow: choice `c` of `node` asks for state `state[c]` (-1: asks for none)."""

    node: int
    state: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """One tensor, from the node that makes it to the nodes that use it.

    `source_state[c]` is the state the source's choice `c` leaves it in. Arc `a` leads from state
    `tails[a]` to `heads[a]` and costs `costs[a]`. `states` names them (text of a sharding).
    `placements[s, k]` is a number for what state `s` is on mesh axis `k`, where there are any:
    states that differ in one are neighbours, which guides a search and changes no answer.
    """

    key: str
    source: int
    source_state: IntArray
    sinks: tuple[Sink, ...]
    states: tuple[str, ...]
    tails: IntArray
    heads: IntArray
    costs: IntArray
    placements: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Saving:
    """By how much a window would take less than the sum of its costs if it took as long as one
    `resource` is busy: `nodes[i][c]` for choice `c` of node `i`, `flows[f][a]` for arc `a` of flow
    `f` where it is used."""

    resource: str
    nodes: Mapping[int, IntArray]
    flows: Mapping[int, IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A stretch of the step in which resources are busy side by side: it takes as long as the
    busiest, so that the least of the `savings` is hidden."""

    key: str
    savings: tuple[Saving, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """From `start` until before `stop`, a node takes `amounts[c]` under its choice `c`."""

    start: int
    stop: int
    amounts: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Nodes, edges, flows and limits; see the module's text. `keys` are canonical names of nodes,
    and the texts of `labels` those of each node's choices: they alone break ties. The usages of a
    node do not overlap."""

    name: str
    keys: tuple[str, ...]
    labels: tuple[tuple[Label, ...], ...]
    costs: tuple[IntArray, ...]
    usages: tuple[tuple[Usage, ...], ...]
    edges: tuple[Edge, ...] = ()
    flows: tuple[Flow, ...] = ()
    usage_limit: int | None = None
    windows: tuple[Window, ...] = ()
    other_limits: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of times that have one of their own, where there is a `usage_limit`."""

    def __post_init__(self) -> None:
        if not (len(self.labels) == len(self.costs) == len(self.usages) == len(self.keys)):
            raise ValueError(f"problem {self.name}: per-node lists differ in length")
        for i, (labels, costs, usages) in enumerate(
            zip(self.labels, self.costs, self.usages, strict=True)
        ):
            if not len(labels) == len(costs) > 0 or any(
                len(usage.amounts) != len(costs) for usage in usages
            ):
                raise ValueError(f"problem {self.name}: node {self.keys[i]} has ragged choices")

    def limit_at(self, time: int) -> int:
        """What may be in use at a time. ValueError if nothing is limited."""
        if self.usage_limit is None:
            raise ValueError(f"problem {self.name} has no limit")
        return self.other_limits.get(time, self.usage_limit)


class Status(StrEnum):
    """What is known of a solution. `FEASIBLE` comes with a gap, `LIMIT` without any solution,
    `BEATEN` with a bound: no solution is below the cutoff."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    LIMIT = "limit"
    BEATEN = "beaten"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why a problem has no solution: at `time`, at least `needed` is used where `limit` is there;
    `largest` names the nodes that hold most, with what each takes at the least."""

    time: int
    needed: int
    limit: int
    largest: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """Where the simplex method ended on the relaxation of a problem: names of columns and rows, and
    the status of each, in the solver's own numbers. A problem that has much in common with it is
    solved from there in few steps."""

    column_names: IntArray
    columns: IntArray
    row_names: IntArray
    rows: IntArray


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice per node, with what is known of it.

    `objective` is the cost of `choice`, computed again from the problem (not the solver's word);
    `bound` is a proven lower bound on every solution's cost. `arcs[f]` lists the arcs of flow `f`
    that are used, in ascending order. `choice` is empty when the status has no solution. `basis` is
    where the relaxation ended, if one was solved, and `byte_ns` what a byte more of memory would
    save by that, of which no more bytes save more each. Memory `is_limiting` unless it is known
    that no plan would be better with more of it, or none below the cutoff, but for what is
    tolerated. What `is_rough` is the first plan that was found, as was asked for.
    """

    status: Status
    choice: tuple[int, ...] = ()
    arcs: tuple[tuple[int, ...], ...] = ()
    objective: int = 0
    bound: int = 0
    solver: str = ""
    statistics: dict[str, int | float | str] = field(default_factory=dict[str, int | float | str])
    conflict: Conflict | None = None
    basis: Basis | None = field(default=None, repr=False, compare=False)
    byte_ns: float | None = field(default=None, compare=False)
    is_limiting: bool = True
    is_rough: bool = False
