"""A problem with flows as one with cost tables alone, laid out for message passing.

A flow with one commodity is a table of shortest distances between two nodes. With two, it gets a
node of its own, the state in which the two part. From there on they share nothing, so that three
tables state the flow's cost exactly. With more, the cost of every arc is split among the
commodities, each of which is a table. That is a lower bound for any split; the split follows the
prices of the commodities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.ir.grouping import grouped
from autopar.ir.problem import FORBIDDEN, FloatArray, Flow, IntArray, Problem
from autopar.solver.ilp import Model, distinct_sinks
from autopar.solver.pairwise.compiling import compiled, compiled_within
from autopar.solver.pairwise.contract import Contracted
from autopar.solver.pairwise.core import Core, lay_out
from autopar.solver.pairwise.tables import Tables, added

# Potentials: the price per state that a flow charges its sinks and credits its source.
#
# In the relaxation, a commodity of a flow has a price at every state. A sink pays it, the source
# gets it, and over an arc it rises by at most the part of the arc's cost that falls to the
# commodity. The duals of the master's balances are such prices, but only for states on its paths.
# The prices of other states lie between two limits. A sink pays no more than the price of a known
# state and the path from there. A source gets no less than the price of a known state less the path
# to it. Message passing starts from the middle, which, like both limits, rises over no arc by more
# than the arc's cost. From there it raises the bound further and sooner than from the upper limit
# for sinks and the lower one for sources.

Potentials = tuple[tuple[FloatArray, ...], ...]
"""Per flow and commodity, in the order of `distinct_sinks`, the price at each state."""


def no_potentials(problem: Problem) -> Potentials:
    """All prices zero."""
    return tuple(
        (np.zeros(len(flow.states)),) * len(distinct_sinks(flow)) for flow in problem.flows
    )


def potentials(
    problem: Problem,
    kept: Sequence[IntArray],
    model: Model,
    row_duals: FloatArray,
    distances: Sequence[IntArray],
) -> Potentials:
    """The prices for the flows of `problem` by `row_duals`, in units of the cost. `model` is that
    of the master, which is `problem` with the choices `kept`.

    Sinks of one node with equal states in the master are one commodity there, though they may be
    two in the problem: the first of them bears the price.
    """
    by_flow: list[tuple[FloatArray, ...]] = []
    for flow, balances, distance in zip(problem.flows, model.balances, distances, strict=True):
        left: dict[tuple[int, bytes], IntArray] = {}
        for node, states in distinct_sinks(flow):
            key = (node, states[kept[node]].tobytes())
            if key not in left:
                left[key] = balances[len(left)]
        of_flow: list[FloatArray] = []
        for node, states in distinct_sinks(flow):
            state = states[kept[node]]
            rows = left.pop((node, state.tobytes()), np.full(len(flow.states), -1))
            of_flow.append(_potential(rows, row_duals, distance))
        by_flow.append(tuple(of_flow))
    return tuple(by_flow)


def _potential(rows: IntArray, row_duals: FloatArray, distance: IntArray) -> FloatArray:
    known = np.flatnonzero(rows >= 0)
    if not len(known):
        return np.zeros(len(rows))
    price: FloatArray = -row_duals[rows[known]]
    path_costs: FloatArray = np.where(distance >= FORBIDDEN, np.inf, distance.astype(np.float64))
    most: FloatArray = (price[:, None] + path_costs[known]).min(axis=0)
    least: FloatArray = (price[None, :] - path_costs[:, known]).max(axis=1)
    most = np.where(np.isfinite(most), most, least)
    least = np.where(np.isfinite(least), least, most)
    reached = np.isfinite(most)
    return np.where(
        reached, (np.where(reached, most, 0.0) + np.where(reached, least, 0.0)) / 2, 0.0
    )


# The costs of paths after the savings of windows are taken off arcs (`windows.weighed`).
#
# A tensor takes a fastest path by the full costs of arcs. After savings, slower paths may be
# cheaper. A bound that includes these would be one on plans that do not exist (three axes of 8x8x8
# devices, Llama-8B: 3 % below the relaxation).

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none


def distances_weighed(flows: Sequence[Flow], weighed: Sequence[Flow]) -> list[IntArray]:
    """Per flow and from state to state, the least cost in `weighed`, whose arcs cost at least 0, of
    a path that is fastest in `flows`; `FORBIDDEN` where there is no path."""
    known: dict[tuple[int, bytes, bytes, bytes, bytes], IntArray] = {}
    distances: list[IntArray] = []
    for flow, other in zip(flows, weighed, strict=True):
        ends = (len(flow.states), flow.tails.tobytes(), flow.heads.tobytes())
        key = (*ends, flow.costs.tobytes(), other.costs.tobytes())
        if key not in known:
            arcs = (flow.tails, flow.heads, flow.costs, other.costs)
            known[key] = _least_of_fastest(len(flow.states), *arcs)
        distances.append(known[key])
    return distances


@compiled_within
def unconnected(size: int) -> IntArray:
    """Distances between states without arcs: 0 from a state to itself, else `FORBIDDEN`."""
    distances = np.empty((size, size), dtype=np.int64)
    for i in range(size):
        for j in range(size):
            distances[i, j] = 0 if i == j else FORBIDDEN
    return distances


@compiled
def _least_of_fastest(
    size: int, tails: IntArray, heads: IntArray, costs: IntArray, weighed: IntArray
) -> IntArray:
    """Floyd and Warshall's recursion on pairs of costs, compared in lexicographic order."""
    first, second = unconnected(size), unconnected(size)
    for a in range(len(tails)):
        i, j = tails[a], heads[a]
        is_less = costs[a] < first[i, j]
        if is_less or (costs[a] == first[i, j] and weighed[a] < second[i, j]):
            first[i, j], second[i, j] = costs[a], weighed[a]
    for middle in range(size):
        for i in range(size):
            if first[i, middle] >= FORBIDDEN:
                continue
            for j in range(size):
                through = first[i, middle] + first[middle, j]
                least = second[i, middle] + second[middle, j]
                if through < first[i, j] or (through == first[i, j] and least < second[i, j]):
                    first[i, j], second[i, j] = through, least
    for i in range(size):
        for j in range(size):
            if first[i, j] >= FORBIDDEN:
                second[i, j] = FORBIDDEN
    return second


_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Relayed:
    """The `core`, and the `message` from the potentials. Choice `c` of node `i` of the problem is
    label `labels[i][c]` of the core, or -1 where the choice is impossible."""

    core: Core
    message: FloatArray
    labels: tuple[IntArray, ...]


@dataclass(slots=True)
class _Link:
    """The table of costs between two nodes, and the messages to each of them."""

    table: IntArray
    to_source: FloatArray
    to_target: FloatArray


@dataclass(slots=True)
class _Builder:
    """Collects nodes and links; the nodes of the problem come first."""

    costs: list[IntArray]
    places: list[float]
    links: dict[tuple[int, int], _Link] = field(default_factory=dict[tuple[int, int], _Link])

    def add_node(self, size: int, place: float) -> int:
        self.costs.append(np.zeros(size, dtype=np.int64))
        self.places.append(place)
        return len(self.costs) - 1

    def charge(self, node: int, costs: IntArray) -> None:
        self.costs[node] = added(self.costs[node], costs)

    def link(self, a: int, b: int, table: IntArray, to_a: FloatArray, to_b: FloatArray) -> None:
        """Adds costs between `a` and `b` to those of their link, if there is one."""
        if a > b:
            a, b, table, to_a, to_b = b, a, table.T, to_b, to_a
        there = self.links.get((a, b))
        if there is None:
            self.links[a, b] = _Link(table, to_a, to_b)
            return
        there.table = added(there.table, table)
        there.to_source = there.to_source + to_a
        there.to_target = there.to_target + to_b


def relay(problem: Problem, between: Sequence[IntArray], prices: Potentials) -> Relayed | None:
    """`problem` without flows; None if some node has no choice that is possible by itself.
    `between` has the distances between the states of each flow."""
    builder = _Builder([*problem.costs], _places(problem))
    for edge in problem.edges:
        if edge.source == edge.target:
            builder.charge(edge.source, np.diagonal(edge.cost))
        else:
            nothing = (np.zeros(size) for size in edge.cost.shape)
            builder.link(edge.source, edge.target, edge.cost, *nothing)
    for flow, distance, of_flow in zip(problem.flows, between, prices, strict=True):
        if not of_flow:
            continue
        if len(of_flow) == 2:
            _meet(builder, flow, distance, of_flow)
        else:
            _split(builder, flow, distance, of_flow)
    if any((costs >= FORBIDDEN).all() for costs in builder.costs):
        return None
    return _laid_out(problem, builder)


def _places(problem: Problem) -> list[float]:
    """The positions of nodes: those of the problem, but a node that comes after its users is put
    behind its maker. Message passing works best where tensors go forward."""
    places = [float(i) for i in range(len(problem.keys))]
    pairs = [(flow.source, sink.node) for flow in problem.flows for sink in flow.sinks]
    makers = grouped((user, maker) for maker, user in pairs)
    for node, users in grouped(pairs).items():
        if min(users) < node and node in makers:
            places[node] = min(makers[node]) + 0.25
    return places


def _meet(
    builder: _Builder, flow: Flow, distance: IntArray, prices: tuple[FloatArray, ...]
) -> None:
    every = np.arange(len(flow.states))
    node = builder.add_node(len(every), builder.places[flow.source] + 0.5)
    table = _paid(distance, flow.source_state, every)
    to_source = -_at(prices[0] + prices[1], flow.source_state)
    to_node = np.zeros(len(every))
    for (sink, state), price in zip(distinct_sinks(flow), prices, strict=True):
        to_sink = _paid(distance, every, state)
        if sink == flow.source:
            table, to_source = added(table, to_sink.T), to_source + _at(price, state)
        else:
            builder.link(node, sink, to_sink, -price, _at(price, state))
            to_node = to_node + price
    builder.link(flow.source, node, table, to_source, to_node)


def _split(
    builder: _Builder, flow: Flow, distance: IntArray, prices: tuple[FloatArray, ...]
) -> None:
    parts = _shares(flow, prices)
    for (sink, state), price, part in zip(distinct_sinks(flow), prices, parts, strict=True):
        arcs = (flow.tails, flow.heads, part)
        own = distance if len(prices) == 1 else _shortest_distances(len(flow.states), *arcs)
        table = _paid(own, flow.source_state, state)
        if sink == flow.source:
            builder.charge(sink, np.diagonal(table))
        else:
            to_source = -_at(price, flow.source_state)
            builder.link(flow.source, sink, table, to_source, _at(price, state))


@compiled
def _shortest_distances(size: int, tails: IntArray, heads: IntArray, costs: IntArray) -> IntArray:
    """`routing.shortest_distances`, compiled. On three axes a tensor has hundreds of states, for
    which numpy takes five times as long, and every commodity has costs of its own."""
    distances = unconnected(size)
    for a in range(len(tails)):
        distances[tails[a], heads[a]] = min(distances[tails[a], heads[a]], costs[a])
    for middle in range(size):
        for i in range(size):
            upto = distances[i, middle]
            if upto < FORBIDDEN:
                for j in range(size):
                    distances[i, j] = min(distances[i, j], upto + distances[middle, j])
    return distances


def _shares(flow: Flow, prices: tuple[FloatArray, ...]) -> list[IntArray]:
    """The part of each arc's cost that falls to each commodity: the rise of its price, scaled down
    if the rises exceed the cost, and an equal part of the rest. The sum is the cost."""
    costs = np.minimum(flow.costs, FORBIDDEN).astype(np.float64)
    rises = np.array([np.maximum(0.0, p[flow.heads] - p[flow.tails]) for p in prices])
    total = rises.sum(axis=0)
    capped = rises * np.minimum(1.0, costs / np.maximum(total, 1.0))
    rest = np.maximum(0.0, costs - capped.sum(axis=0)) / len(prices)
    exact = np.floor((capped + rest) * (1 - _ROUNDING)).astype(np.int64)
    exact[0] += np.minimum(flow.costs, FORBIDDEN) - exact.sum(axis=0)
    return [np.where(flow.costs >= FORBIDDEN, FORBIDDEN, part) for part in exact]


def _paid(distance: IntArray, rows: IntArray, columns: IntArray) -> IntArray:
    """Distances from state to state; 0 where no tensor is made or read."""
    nothing = (rows < 0)[:, None] | (columns < 0)[None, :]
    return np.where(nothing, 0, distance[rows[:, None], columns[None, :]])


def _at(prices: FloatArray, states: IntArray) -> FloatArray:
    return np.where(states < 0, 0.0, prices[states])


def _laid_out(problem: Problem, builder: _Builder) -> Relayed:
    order = sorted(range(len(builder.costs)), key=lambda i: (builder.places[i], i))
    place = {node: at for at, node in enumerate(order)}
    kept = [np.flatnonzero(builder.costs[node] < FORBIDDEN) for node in order]
    tables, near = Tables(), [dict[int, int]() for _ in order]
    moved: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    for (a, b), link in builder.links.items():
        ends = (place[a], place[b])
        table, messages = link.table, (link.to_source, link.to_target)
        if ends[0] > ends[1]:
            ends, table, messages = (ends[1], ends[0]), table.T, (messages[1], messages[0])
        number = tables.add(table[np.ix_(kept[ends[0]], kept[ends[1]])])
        near[ends[0]][ends[1]] = near[ends[1]][ends[0]] = number
        moved[ends] = (messages[0][kept[ends[0]]], messages[1][kept[ends[1]]])
    contracted = Contracted(
        tables=tables,
        nodes=list(range(len(order))),
        costs=[builder.costs[node][some] for node, some in zip(order, kept, strict=True)],
        kept=kept,
        near=near,
        takes_memory=[False] * len(order),
        decided=[],
    )
    core = lay_out(_reordered(problem, builder.costs, order), contracted)
    labels: list[IntArray] = []
    for node, costs in enumerate(problem.costs):
        at = place[node]
        of_node = np.full(len(costs), -1, dtype=np.int64)
        of_node[kept[at]] = np.arange(core.first[at], core.first[at + 1])
        labels.append(of_node)
    return Relayed(core, _messages(core, moved), tuple(labels))


def _reordered(problem: Problem, costs: Sequence[IntArray], order: Sequence[int]) -> Problem:
    """The problem's nodes and the added ones, in `order`; without edges and flows."""
    more = len(costs) - len(problem.keys)
    empty = [np.zeros(len(c), dtype=np.int64) for c in costs[len(problem.keys) :]]
    keys = (*problem.keys, *(f"relay {i}" for i in range(more)))
    labels = (*problem.labels, *(("",) * len(e) for e in empty))
    usages = (*problem.usages, *((),) * more)
    return replace(
        problem,
        keys=tuple(keys[i] for i in order),
        labels=tuple(labels[i] for i in order),
        costs=tuple(costs[i] for i in order),
        usages=tuple(usages[i] for i in order),
        edges=(),
        flows=(),
    )


def _messages(
    core: Core, moved: dict[tuple[int, int], tuple[FloatArray, FloatArray]]
) -> FloatArray:
    counts = np.diff(core.first)
    message = np.zeros(int((counts[core.source] + counts[core.target]).sum()))
    ends = zip(core.source.tolist(), core.target.tolist(), strict=True)
    for edge, pair in enumerate(ends):
        to_source, to_target = moved[pair]
        for at, part in (
            (int(core.source_message[edge]), to_source),
            (int(core.target_message[edge]), to_target),
        ):
            message[at : at + len(part)] = part
    return message
