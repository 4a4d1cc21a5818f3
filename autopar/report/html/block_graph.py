"""What the ops of a block read and make, in which sharding: the content of the block's picture.

Ops that would each be a line of a kernel (elementwise ops, sums, copies) are folded into one box
with their neighbours of the same module. Nothing is redistributed within a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from autopar.ir.graph import Phase
from autopar.ir.grouping import grouped
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import StagePlan
from autopar.plans.requests.matching import general
from autopar.plans.structure import Param
from autopar.report.names import PARAM, WHOLE_MODEL, short_op
from autopar.report.timeline import block_of
from autopar.rules.work import fuses

_FORWARD = Phase.FORWARD.value

MAX_BLOCKS = 8
MAX_OPS = 400
"""A graph of more ops is no picture that anyone reads."""


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor that a box reads: the sharding in which it is made (empty if not known), and that in
    which it is read; both as in the file."""

    name: str
    source_state: str
    read: str

    @property
    def is_moved(self) -> bool:
        return self.source_state not in ("", self.read)


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A tensor that a box makes: its type, the sharding in which it is made, and those to which it
    is redistributed for readers outside the picture."""

    type: str
    state: str
    sent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """Ops that are drawn as one, in order: their module within the block, their names, and their
    time in one block. `reads` come from outside the picture, `makes` are for other boxes or
    readers."""

    module: str
    ops: tuple[str, ...]
    time_ns: int
    reads: tuple[TensorRead, ...]
    makes: tuple[TensorWrite, ...]


@dataclass(frozen=True, slots=True)
class Arrow:
    """Tensors of box `start` that box `end` reads."""

    start: int
    end: int
    reads: tuple[TensorRead, ...]


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The ops of one block in one phase; `num_ops` of them, too many to draw if `boxes` is empty.
    `count` is how often the model has the block."""

    block: str
    phase: str
    count: int
    num_ops: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def block_graphs(plan: StagePlan) -> tuple[BlockGraph, ...]:
    """The graphs of the repeated blocks, the costliest first, forward before backward; of the whole
    model if nothing repeats."""
    ops, first_runs = plan.estimates.ops, _first_runs(plan)
    blocks: dict[str, dict[str, list[str]]] = {}
    for key in sorted(first_runs, key=lambda key: first_runs[key]):
        module = general(ops[key].module)
        block = block_of(module) if "*" in module else ""
        blocks.setdefault(block, {}).setdefault(ops[key].phase, []).append(key)
    if len(blocks) > 1:
        blocks.pop("", None)
    costs = {
        block: sum(ops[key].compute_ns for keys in phases.values() for key in keys)
        for block, phases in blocks.items()
    }
    chosen = sorted(blocks, key=lambda block: (-costs[block], block))[:MAX_BLOCKS]
    order = {phase.value: k for k, phase in enumerate(Phase)}
    return tuple(
        _graph(plan, first_runs, block, phase, blocks[block][phase])
        for block in chosen
        for phase in sorted(blocks[block], key=lambda name: (order.get(name, 9), name))
    )


def _first_runs(plan: StagePlan) -> dict[str, int]:
    """When the ops of each key run for the first time."""
    items = [item for run in plan.estimates.runs for item in run.items]
    ops = plan.estimates.ops
    return {item: place for place, item in reversed([*enumerate(items)]) if item in ops}


_Wire = tuple[str, str, TensorRead]
"""(op that makes a tensor, op that reads it, how)."""


def _graph(
    plan: StagePlan, first_runs: Mapping[str, int], block: str, phase: str, keys: Sequence[str]
) -> BlockGraph:
    ops = plan.estimates.ops
    count = max(1, *(ops[key].count for key in keys))
    title = block or WHOLE_MODEL
    if len(keys) > MAX_OPS:
        return BlockGraph(title, phase, count, len(keys), (), ())
    all_reads = [(source, key, read) for key in keys for source, read in _reads(plan, phase, key)]
    inside = set(keys)
    wires: list[_Wire] = []
    outer: dict[str, list[TensorRead]] = defaultdict(list)
    for source, key, read in all_reads:
        if source in inside and first_runs[source] < first_runs[key]:
            wires.append((source, key, read))
        else:
            earlier = "previous " if source in inside else ""
            outer[key].append(replace(read, name=f"{earlier}{read.name}"))
    groups = fold(
        [(key, general(ops[key].module) if _folds(ops[key]) else None) for key in keys],
        [(source, key, not read.is_moved) for source, key, read in wires],
    )
    box_of = {key: k for k, members in enumerate(groups) for key in members}
    between = grouped(((box_of[source], box_of[key]), read) for source, key, read in wires)
    boxes = tuple(_box(plan, block, count, members, wires, outer) for members in groups)
    arrows = tuple(
        Arrow(a, b, tuple(dict.fromkeys(reads))) for (a, b), reads in between.items() if a != b
    )
    return BlockGraph(title, phase, count, len(keys), boxes, arrows)


def _box(
    plan: StagePlan,
    block: str,
    count: int,
    members: Sequence[str],
    wires: Sequence[_Wire],
    outer: Mapping[str, Sequence[TensorRead]],
) -> Box:
    ops = plan.estimates.ops
    readers = {key: [to for source, to, _ in wires if source == key] for key in members}
    leaving = [key for key in members if set(readers[key]) - set(members) or not readers[key]]
    return Box(
        module=general(ops[members[0]].module).removeprefix(block).lstrip(".") or "(block)",
        ops=tuple(short_op(ops[key].op) for key in members),
        time_ns=sum(ops[key].compute_ns for key in members) // count,
        reads=tuple(dict.fromkeys(read for key in members for read in outer.get(key, ()))),
        makes=tuple(
            dict.fromkeys(
                TensorWrite(kind, state, () if readers[key] else _sent(plan, key, state))
                for key in leaving
                for kind, state in ops[key].outputs
            )
        ),
    )


def _sent(plan: StagePlan, key: str, state: str) -> tuple[str, ...]:
    """Where the route of an op's tensor ends."""
    steps = plan.structure.routes.get(f"{key}@{plan.estimates.ops[key].phase}", ())
    ends = [step.partition(" -> ")[::2] for step in steps]
    starts = {start for start, _ in ends}
    return tuple(dict.fromkeys(end for _, end in ends if end not in starts and end != state))


def _folds(op: OpTotal) -> bool:
    """Whether an op is drawn with its neighbours: it fuses, and is none of autopar's own ops."""
    return op.op.startswith("aten.") and fuses(op.op)


def _reads(plan: StagePlan, phase: str, key: str) -> Iterator[tuple[str, TensorRead]]:
    """What an op reads, and the key of the op that makes it, if one does."""
    ops = plan.estimates.ops
    for name, read in ops[key].inputs:
        source, output = _source(ops, name)
        if name.startswith(PARAM):
            param = _param(plan, name)
            source_state = (
                "" if param is None else param.storage if phase == _FORWARD else param.for_backward
            )
            yield "", TensorRead(_stem(name).rpartition(".")[2], source_state, read)
        elif source and ops[source].outputs:
            maker = ops[source]
            source_state = maker.outputs[min(output, len(maker.outputs) - 1)][1]
            where = general(maker.module).rpartition(".")[2].replace("*", "")
            title = f"{where} {short_op(maker.op)}".strip()
            if maker.phase != phase:
                source_state, title = plan.structure.saved.get(name, source_state), f"saved {title}"
            yield source, TensorRead(title, source_state, read)
        else:
            yield "", TensorRead(name, "", read)


def _source(ops: Mapping[str, OpTotal], name: str) -> tuple[str, int]:
    """The op that makes a tensor, and which of its outputs that is; "" if no op makes it."""
    if name in ops:
        return name, 0
    stem, _, number = name.rpartition(".")
    if stem in ops and number.isascii() and number.isdigit() and len(number) < 6:
        return stem, int(number)
    return "", 0


def _stem(key: str) -> str:
    """A parameter's key without what tells classes of one pattern apart."""
    return key.partition("~")[0]


def _param(plan: StagePlan, key: str) -> Param | None:
    """The first parameter of a class."""
    pattern = _stem(key).removeprefix(PARAM)
    params = plan.structure.params
    return next((param for name, param in params.items() if general(name) == pattern), None)


def fold(
    nodes: Sequence[tuple[str, str | None]], wires: Sequence[tuple[str, str, bool]]
) -> list[list[str]]:
    """Groups of nodes, in the order of `nodes` (which is a topological one).

    `nodes` are (name, kind), `wires` are (from, to, whether it may vanish). Two nodes of one kind
    are joined if a wire that may vanish connects them, and no other path does. Nodes of kind None
    are never joined.
    """
    kind, place = dict(nodes), {name: k for k, (name, _) in enumerate(nodes)}
    home = {name: name for name in place}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(place)
    _connect(graph, ((start, end, not vanishes) for start, end, vanishes in wires))
    changed = True
    while changed:
        changed = False
        for start, end, _ in wires:
            a, b = home[start], home[end]
            if (
                a == b
                or kind[a] is None
                or kind[a] != kind[b]
                or graph.edges[a, b]["stays"]
                or any(other != b and nx.has_path(graph, other, b) for other in graph.succ[a])
            ):
                continue
            around: list[tuple[str, str, bool]]
            around = [*graph.in_edges(b, data="stays"), *graph.out_edges(b, data="stays")]
            graph.remove_node(b)
            home.update((name, a) for name in place if home[name] == b)
            moved = ((a if x == b else x, a if y == b else y, stays) for x, y, stays in around)
            _connect(graph, ((x, y, stays) for x, y, stays in moved if x != y))
            changed = True
    return list(grouped((home[name], name) for name in place).values())


def _connect(graph: nx.DiGraph[str], wires: Iterable[tuple[str, str, bool]]) -> None:
    """Add wires; of several between two nodes, one that stays keeps them apart."""
    for start, end, stays in wires:
        edge = graph.get_edge_data(start, end, {"stays": False})
        graph.add_edge(start, end, stays=stays or edge["stays"])
