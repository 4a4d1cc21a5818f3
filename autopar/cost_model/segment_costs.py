"""What each segment of a model takes for a microbatch, of a step that was played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_model.optimizer import find_optimizer
from autopar.cost_model.played import PlayedStep
from autopar.cost_model.turn_times import arrivals
from autopar.ir.draws import STATE
from autopar.ir.graph import Graph, Phase, Ref, Role
from autopar.ir.rounding import RESTORE, ROUND
from autopar.ir.schedule import Compute, Event, Schedule
from autopar.ir.segments import Segment
from autopar.ir.stage_homes import assign
from autopar.ir.uses import root_of
from autopar.plans.options import Options


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Nanoseconds of a microbatch, forward and backward, and bytes of a device: for parameters with
    their gradients and the optimizer's states, and for what a microbatch has saved."""

    forward_ns: int
    backward_ns: int
    static_bytes: int
    saved_bytes: int


def segment_costs(
    step: PlayedStep, plain: Graph, segments: Sequence[Segment], options: Options
) -> tuple[SegmentCost, ...]:
    """That of each of the `segments` of `plain`, the graph of `step` without what backward makes
    again or rounds, under the decisions that `step` was played with. A device works on a segment
    from its first op to that of the next; what is made again belongs where it was made."""
    graph, layout = step.layout.graph, step.layout
    homes = assign(plain, [segment.start for segment in segments[1:]])
    home_of = {node.name: homes.home(node) for node in plain.nodes}
    readers = {node.target: homes.readers[node.index] for node in plain.with_role(Role.PARAM)}
    times = {phase: [0] * len(segments) for phase in Phase}
    marks, here = arrivals(step.played), 0
    for k, (phase, event) in enumerate(_in_phases(step.scheduled)):
        if isinstance(event, Compute):
            home = home_of[_name_in_plain(graph, event.node)]
            here = here if home is None else home
        times[phase][here] += marks[k + 1] - marks[k]
    copies = 2 + find_optimizer(options.optimizer).states
    static, saved = [0] * len(segments), [0] * len(segments)
    for node in graph.with_role(Role.PARAM):
        ref, users = Ref(node.index), readers[node.target]
        if users and not layout.params[node.target].hosted:
            static[min(users)] += copies * layout.held_bytes(ref, layout.made(ref))
    for value in step.scheduled.saved:
        home = home_of[_name_in_plain(graph, value.ref.node)]
        if home is not None:
            saved[home] += step.prices.held(value)[1]
    columns = times[Phase.FORWARD], times[Phase.BACKWARD], static, saved
    return tuple(
        SegmentCost(forward // graph.turns, backward // graph.turns, *held)
        for forward, backward, *held in zip(*columns, strict=True)
    )


def _name_in_plain(graph: Graph, index: int) -> str:
    """The op of the plain graph that one of the step is a copy of, or goes with."""
    node = graph.nodes[index + (graph.nodes[index].op == STATE)]
    while node.op in (ROUND, RESTORE):
        node = graph.nodes[root_of(graph, node.inputs[0])[0].node]
    return node.name


def _in_phases(scheduled: Schedule) -> Iterator[tuple[Phase, Event]]:
    """All events but the update, each with its phase."""
    for turn in (*(scheduled.turns - 1) * (scheduled.before,), scheduled):
        assert turn is not None
        yield from ((Phase.FORWARD, event) for event in turn.forward)
        yield from ((Phase.BACKWARD, event) for event in turn.backward + turn.weights)
