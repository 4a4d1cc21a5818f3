"""The problem as an integer linear program, in arrays, which `relaxation` passes to HiGHS.

Variables (all in [0, 1], only `s` integer):

* `s[i,c]` -- node `i` takes choice `c`; `sum_c s[i,c] = 1`. Forbidden choices have no column.
* `z[p,q]` per edge, between classes of choices with equal costs: `sum_q z[p,q] = s(p)` and
  `sum_p z[p,q] = s(q)`, cost on `z`. Forbidden pairs have no column.
* `f_k[a]` per flow and commodity `k` (equal sinks of one node), on arcs `a`: per state,
  `out - in + dump = s(source in that state) - s(sink in that state)`. `dump` takes up the flow of
  choices whose sink reads nothing.
* `y[a] >= f_k[a]` on arcs that several commodities can use: the cost is on `y`, so that a shared
  arc is charged once. On an arc of one commodity the cost is on `f`.
* memory: `sum s[i,c] (usage[i,c] - least usage of i) <= limit - sum of least usages`, per maximal
  set of live nodes. With `excess` the rows may be broken, and the excess is the objective.
* `w` per window, the part of `most_hidden` that is hidden; its cost is below 0:
  `most_hidden w <= sum s saved + sum y saved` for each of its savings.

With `s` integer, every flow splits into paths and `z` is integer. `y` may stay fractional where
several commodities share arcs: the relaxation of a directed Steiner problem has a gap. So the
caller compares each flow's cost with the exact one and makes `y` integer where they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.problem import (
    FORBIDDEN,
    BoolArray,
    Edge,
    FloatArray,
    Flow,
    IntArray,
    Problem,
    Window,
)
from autopar.solver.builder import (
    NameKind,
    ProgramBuilder,
    joined_name,
    name_of,
    places_of,
    tie_weights,
)
from autopar.solver.memory import live_sets
from autopar.solver.paths import PathFinder, any_path
from autopar.solver.routing import all_distances
from autopar.solver.windows import Shares, most_hidden, normalised

_LARGEST_COST_BITS = 20


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory row of `time`: its unit is bytes times `scale`."""

    time: int
    row: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class _FlowParts:
    """The columns of a flow that bear cost (`priced`) and their `arcs`, those columns that several
    commodities share, and the rows per commodity and state."""

    priced: IntArray
    arcs: IntArray
    shared: IntArray
    balances: tuple[IntArray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """`min cost x` with `row_lower <= A x <= row_upper`, `0 <= x <= 1`; `A` in compressed rows.

    `cost` is exact. The solver gets `cost * cost_scale`, and memory rows are scaled likewise, by
    powers of two: its tolerances are absolute, and made for figures near one.

    `choices[i][c]` is the column of a choice (-1: none), and row `i` takes exactly one choice of
    node `i`. `flows[f]` are the columns of flow `f` that bear a cost. `shared[f]` are those that
    must be integer for an exact flow. `balances[f][k][p]` is the row of commodity `k` (in the order
    of `distinct_sinks`) at state `p` (-1: none). `hidden[w]` is the column of the hidden part of
    window `w`, which is continuous, and `windows[w]` are the rows of its savings, in nanoseconds
    times `window_scales[w]`. Names are rows of four numbers, made of keys, labels and states: what
    two problems have in common has the same names in both.
    """

    cost: IntArray
    integer: BoolArray
    row_starts: IntArray
    columns: IntArray
    values: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    choices: tuple[IntArray, ...]
    flows: tuple[IntArray, ...]
    shared: tuple[IntArray, ...]
    balances: tuple[tuple[IntArray, ...], ...]
    limits: tuple[Limit, ...]
    hidden: IntArray
    windows: tuple[IntArray, ...]
    window_scales: tuple[float, ...]
    column_names: IntArray
    row_names: IntArray

    @property
    def cost_scale(self) -> float:
        """A power of two that brings the largest cost to at most 2**`_LARGEST_COST_BITS`."""
        largest = int(np.abs(self.cost).max(initial=1))
        return 2.0 ** (_LARGEST_COST_BITS - largest.bit_length())

    def byte_ns(self, row_duals: FloatArray) -> float:
        """Nanoseconds that one more byte, at all times, would save, by `row_duals` in units of the
        cost. Further bytes save no more each."""
        return sum(max(0.0, -float(row_duals[each.row])) * each.scale for each in self.limits)

    def shares(self, row_duals: FloatArray) -> Shares:
        """The weights of the windows' savings by `row_duals`, in units of the cost."""
        scales = zip(self.windows, self.window_scales, strict=True)
        return normalised([scale * row_duals[rows] for rows, scale in scales])

    @property
    def num_columns(self) -> int:
        """Number of variables."""
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        """Number of constraints."""
        return len(self.row_lower)


def build_model(problem: Problem, *, excess: bool = False, paths: PathFinder = any_path) -> Model:
    """The model of `problem`, with rows for memory when it has a limit; flows take `paths`.

    With `excess`, the objective is the excess of the worst memory row alone, without costs.
    """
    builder = ProgramBuilder()
    nodes = [name_of(key) for key in problem.keys]
    choices = _add_choices(builder, problem, nodes)
    for edge in problem.edges:
        _add_edge(builder, edge, choices, nodes)
    distances = all_distances(problem.flows)
    flows = [
        _add_flow(builder, flow, distance, choices, nodes, paths)
        for flow, distance in zip(problem.flows, distances, strict=True)
    ]
    stated = () if excess else problem.windows
    windows = [_add_window(builder, w, choices, flows) for w in stated]
    is_limited = problem.usage_limit is not None
    limits = _add_memory(builder, problem, choices, excess) if is_limited else []
    if excess:
        builder.costs = [np.zeros(builder.num_columns - 1, dtype=np.int64), np.ones(1, np.int64)]
    return _finish(builder, choices, flows, limits, windows)


def _add_choices(
    builder: ProgramBuilder, problem: Problem, nodes: Sequence[int]
) -> tuple[IntArray, ...]:
    choices: list[IntArray] = []
    weights = tie_weights(problem)
    for node, costs in enumerate(problem.costs):
        allowed = costs < FORBIDDEN
        columns = np.full(len(costs), -1, dtype=np.int64)
        name = (NameKind.CHOICE, nodes[node], weights[node][allowed])
        columns[allowed] = builder.add_columns(costs[allowed], *name)
        row = builder.add_rows(1, 1.0, 1.0, NameKind.CHOICE, nodes[node])
        builder.add_entries(np.repeat(row, allowed.sum()), columns[allowed], 1.0)
        choices.append(columns)
    return tuple(choices)


def _add_edge(
    builder: ProgramBuilder, edge: Edge, choices: Sequence[IntArray], nodes: Sequence[int]
) -> None:
    name = int(joined_name(nodes[edge.source], nodes[edge.target]))
    cost, source_class = np.unique(edge.cost, axis=0, return_inverse=True)
    cost, target_class = np.unique(cost, axis=1, return_inverse=True)
    if cost.shape == (1, 1) and cost[0, 0] == 0:
        return
    p, q = np.nonzero(cost < FORBIDDEN)
    columns = builder.add_columns(cost[p, q], NameKind.EDGE, name, p, q)
    for side, count, classes, node in (
        (p, cost.shape[0], source_class.ravel(), edge.source),
        (q, cost.shape[1], target_class.ravel(), edge.target),
    ):
        rows = builder.add_rows(count, 0.0, 0.0, NameKind.EDGE, name, nodes[node], places_of(count))
        builder.add_entries(rows[side], columns, 1.0)
        _add_choice_entries(builder, rows, classes, choices[node], -1.0)


def _add_choice_entries(
    builder: ProgramBuilder, rows: IntArray, place: IntArray, columns: IntArray, value: float
) -> None:
    """Puts the column of every choice `c` into row `rows[place[c]]`; a negative place has none."""
    there = (place >= 0) & (columns >= 0)
    builder.add_entries(rows[place[there]], columns[there], value)


def _add_flow(
    builder: ProgramBuilder,
    flow: Flow,
    distance: IntArray,
    choices: Sequence[IntArray],
    nodes: Sequence[int],
    paths: PathFinder,
) -> _FlowParts:
    sinks = distinct_sinks(flow)
    name = name_of(flow.key)
    state_names = np.array([name_of(state) for state in flow.states], np.int64)
    arc_names = joined_name(state_names[flow.tails], state_names[flow.heads])
    source_states = _states(flow.source_state, choices[flow.source])
    targets = [_states(state, choices[node]) for node, state in sinks]
    usable = paths(flow, distance, source_states, targets)
    users = np.zeros(len(flow.costs), dtype=np.int64)
    for arcs in usable:
        users[arcs] += 1
    shared_arcs = np.flatnonzero(users > 1)
    shared = builder.add_columns(
        flow.costs[shared_arcs], NameKind.ARC, name, -1, arc_names[shared_arcs]
    )
    bearing = np.zeros(len(flow.costs), dtype=np.int64)
    bearing[shared_arcs] = shared
    priced, priced_arcs = [shared], [shared_arcs]
    of_states: list[IntArray] = []
    commodities = _commodity_names(sinks, nodes)
    for k, (node, state), arcs in zip(commodities, sinks, usable, strict=True):
        is_shared = users[arcs] > 1
        own_costs = np.where(is_shared, 0, flow.costs[arcs])
        moves = builder.add_columns(own_costs, NameKind.ARC, name, k, arc_names[arcs])
        priced.append(moves[~is_shared])
        priced_arcs.append(arcs[~is_shared])
        link = (NameKind.ARC, name, k, arc_names[arcs[is_shared]])
        links = builder.add_rows(int(is_shared.sum()), 0.0, np.inf, *link)
        builder.add_entries(links, bearing[arcs[is_shared]], 1.0)
        builder.add_entries(links, moves[is_shared], -1.0)
        state_rows = (NameKind.STATE, name, k, state_names)
        rows = builder.add_rows(len(state_names), 0.0, 0.0, *state_rows)
        of_states.append(rows)
        builder.add_entries(rows[flow.tails[arcs]], moves, 1.0)
        builder.add_entries(rows[flow.heads[arcs]], moves, -1.0)
        _add_choice_entries(builder, rows, flow.source_state, choices[flow.source], -1.0)
        _add_choice_entries(builder, rows, state, choices[node], 1.0)
        if (state[choices[node] >= 0] < 0).any():
            free = np.zeros(len(source_states), dtype=np.int64)
            dump = (NameKind.STATE, name, k, state_names[source_states])
            dumps = builder.add_columns(free, *dump)
            builder.add_entries(rows[source_states], dumps, 1.0)
    return _FlowParts(np.concatenate(priced), np.concatenate(priced_arcs), shared, tuple(of_states))


def distinct_sinks(flow: Flow) -> list[tuple[int, IntArray]]:
    """Node and states of each commodity: sinks of one node with equal states are one."""
    distinct = {(sink.node, sink.state.tobytes()): sink.state for sink in flow.sinks}
    return [(node, state) for (node, _), state in distinct.items()]


def _commodity_names(sinks: Sequence[tuple[int, IntArray]], nodes: Sequence[int]) -> Iterator[int]:
    """Names of commodities by their nodes, and by their order among those of one node."""
    seen = Counter[int]()
    for node, _ in sinks:
        yield int(joined_name(nodes[node], seen[node]))
        seen[node] += 1


def _states(states: IntArray, columns: IntArray) -> IntArray:
    """The distinct states of the choices that have a column."""
    present = np.unique(states[columns >= 0])
    return present[present >= 0]


def _add_memory(
    builder: ProgramBuilder, problem: Problem, choices: Sequence[IntArray], excess: bool
) -> list[Limit]:
    binding: list[tuple[int, int, int, list[tuple[int, IntArray]]]] = []
    for time, usages in live_sets(problem):
        room = problem.limit_at(time) - sum(int(amounts.min()) for _, amounts in usages)
        above = [(i, amounts - amounts.min()) for i, amounts in usages]
        excess_bytes = sum(int(more.max()) for _, more in above) - room
        if excess_bytes > 0:
            binding.append((time, room, excess_bytes, above))
    most = max((excess_bytes for _, _, excess_bytes, _ in binding), default=1)
    worst = np.ones(1, dtype=np.int64)
    excess_column = builder.add_columns(worst, NameKind.EXCESS) if excess else None
    limits: list[Limit] = []
    for time, room, _, above in binding:
        scale = 2.0 ** -max(int(more.max()) for _, more in above).bit_length()
        row = builder.add_rows(1, -np.inf, room * scale, NameKind.LIMIT, time)
        limits.append(Limit(time, int(row[0]), scale))
        for i, more in above:
            there = (more > 0) & (choices[i] >= 0)
            builder.add_entries(
                np.repeat(row, there.sum()), choices[i][there], more[there] * np.float64(scale)
            )
        if excess_column is not None:
            builder.add_entries(row, excess_column, -most * scale)
    return limits


def _add_window(
    builder: ProgramBuilder,
    window: Window,
    choices: Sequence[IntArray],
    flows: Sequence[_FlowParts],
) -> tuple[int, IntArray, float]:
    """The column of a window's hidden part, its rows, and the scale of their values."""
    most = most_hidden(window)
    scale = 2.0 ** -max(1, most).bit_length()
    name = name_of(window.key)
    hidden = builder.add_columns(np.array([-most], np.int64), NameKind.WINDOW, name)
    resources = np.array([name_of(saving.resource) for saving in window.savings], np.int64)
    rows = builder.add_rows(len(resources), 0.0, np.inf, NameKind.WINDOW, name, resources)
    for row, saving in zip(rows, window.savings, strict=True):
        builder.add_entries(np.array([row]), hidden, -most * scale)
        for node, saved in saving.nodes.items():
            there = (saved > 0) & (choices[node] >= 0)
            columns = choices[node][there]
            builder.add_entries(
                np.full(len(columns), row), columns, saved[there] * np.float64(scale)
            )
        for flow, saved in saving.flows.items():
            columns, values = flows[flow].priced, saved[flows[flow].arcs] * np.float64(scale)
            builder.add_entries(np.full(len(columns), row), columns, values)
    return int(hidden[0]), rows, scale


def _finish(
    builder: ProgramBuilder,
    choices: tuple[IntArray, ...],
    flows: Sequence[_FlowParts],
    limits: Sequence[Limit],
    windows: Sequence[tuple[int, IntArray, float]],
) -> Model:
    rows, columns, values = (np.concatenate(part) for part in zip(*builder.entries, strict=True))
    order = np.lexsort((columns, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    values = np.add.reduceat(values, np.flatnonzero(first))
    rows, columns = rows[first], columns[first]
    kept = values != 0
    rows, columns, values = rows[kept], columns[kept], values[kept]
    lower, upper = np.concatenate(builder.lower), np.concatenate(builder.upper)
    used = np.zeros(builder.num_rows, dtype=np.bool_)
    used[rows] = True
    used |= (lower > 0) | (upper < 0)
    counts = np.bincount(rows, minlength=builder.num_rows)[used]
    place = np.where(used, np.cumsum(used) - 1, -1)
    integer = np.zeros(builder.num_columns, dtype=np.bool_)
    for column in choices:
        integer[column[column >= 0]] = True
    return Model(
        cost=np.concatenate(builder.costs),
        integer=integer,
        row_starts=np.concatenate([[0], np.cumsum(counts)]),
        columns=columns,
        values=values,
        row_lower=lower[used],
        row_upper=upper[used],
        choices=choices,
        flows=tuple(parts.priced for parts in flows),
        shared=tuple(parts.shared for parts in flows),
        balances=tuple(tuple(place[rows] for rows in parts.balances) for parts in flows),
        limits=tuple(replace(limit, row=int(place[limit.row])) for limit in limits),
        hidden=np.array([column for column, _, _ in windows], np.int64),
        windows=tuple(place[rows] for _, rows, _ in windows),
        window_scales=tuple(scale for _, _, scale in windows),
        column_names=np.concatenate(builder.column_names),
        row_names=np.concatenate(builder.row_names)[used],
    )
