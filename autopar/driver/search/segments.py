"""The segments of a step: where it may be cut into stages, and which segments are alike.

A segment is one of a list of modules (`layers.3`), or another module that uses parameters
(`embed_tokens`, `norm` and `lm_head`), with all that follows until the next. A state that forward
changes, such as running statistics, is read and changed within one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from autopar.errors import StageError
from autopar.ir.blocks import place_of
from autopar.ir.graph import Graph, Node, Phase, Role
from autopar.ir.passes.stage_assignment import belongs_nowhere, forward_readers, is_of_parameters
from autopar.ir.passes.stages import first_ops, in_stages
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.requests.matching import general
from autopar.plans.requests.policy import Policy
from autopar.rules.work import flops


@dataclass(frozen=True, slots=True)
class Segment:
    """The ops of forward from node `start` on, which begin with those of `module`."""

    module: str
    start: int


def segments(graph: Graph) -> tuple[Segment, ...]:
    """All segments, in the order of forward; one for the whole model, without a module, if no
    module begins one."""
    changes, begins = [*_changes(graph)], first_ops(graph)
    ops = [
        node
        for node in graph.with_role(Role.OP)
        if node.phase is Phase.FORWARD and not node.view and not belongs_nowhere(graph, node)
    ]
    learned = {n.module for n in ops if any(is_of_parameters(graph, ref) for ref in n.inputs)}
    parts: list[Segment] = []
    seen, last = set[str](), -1
    for node in ops:
        listed, module = place_of(node.module)
        if module and module not in seen and (listed or module in learned):
            seen.add(module)
            # A module may use parameters of its own after others within it: it began with those.
            if not parts or begins[module] > last:
                parts.append(Segment(module, node.index if parts else 0))
        last = node.index
    if not parts:
        return (Segment("", 0),)
    return tuple(
        each for each in parts if not any(first < each.start <= last for first, last in changes)
    )


def _changes(graph: Graph) -> Iterator[tuple[int, int]]:
    """For each state that forward changes, the first op that reads it, and the op that computes its
    new value."""
    sources = {n.target: n.inputs[0].node for n in graph.with_role(Role.MUTATION, Role.UPDATE)}
    if not sources:
        return
    held = graph.with_role(Role.BUFFER, Role.PARAM)
    names = {n.index: n.target for n in held if n.target in sources}
    first = dict(sources)
    for node in graph.with_role(Role.OP):
        for name in (names[ref.node] for ref in node.inputs if ref.node in names):
            first[name] = min(first[name], node.index)
    yield from ((first[name], last) for name, last in sources.items())


@dataclass(frozen=True, slots=True)
class SegmentKind:
    """`count` equal segments that follow one another. Each takes the part `share` of stage number
    `stage`."""

    count: int
    stage: int
    share: float


class SampledStep:
    """A step in microbatches: its segments `parts`, their `kinds` in order, and a few segments of
    each kind as `stages`. No part begins where no stage can. StageError if the step can be cut
    nowhere."""

    def __init__(self, graph: Graph, policy: Policy) -> None:
        self.graph, self.parts, self.policy = graph, segments(graph), policy
        self.kinds: tuple[SegmentKind, ...] = ()
        self.stages: list[Graph] = []
        self.work: list[float] = []
        """Floating-point operations of each segment in forward, of one microbatch."""
        self.busiest = 0
        """The stage whose kinds do most of the work."""
        try:
            self._sample()
        except StageError:
            starts = [part.start for part in self.parts[1:]]
            impossible = {start for start in starts if not _can_begin(graph, start)}
            if not impossible or len(impossible) == len(starts):
                raise
            self.parts = tuple(part for part in self.parts if part.start not in impossible)
            self._sample()

    def _sample(self) -> None:
        runs = [len([*run]) for _, run in groupby(self._kinds())]
        ends = accumulate(runs)
        groups = [range(end - count, end) for end, count in zip(ends, runs, strict=True)]
        self.kinds, planned = self._kinds_of(groups)
        done, first = [0.0] * len(planned), 0
        for kind in self.kinds:
            done[kind.stage] += sum(self.work[first : first + kind.count])
            first += kind.count
        self.busiest = done.index(max(done))
        starts = {at for part in planned for at in (part.start, part.stop)}
        cuts = sorted(starts - {0, len(self.parts)})
        stages = in_stages(self.graph, [self.parts[at].start for at in cuts])
        self.stages = [stages[[0, *cuts].index(part.start)] for part in planned]

    def _kinds(self) -> Iterator[object]:
        """For each segment, a value that equal segments share."""
        ops: list[list[object]] = [[] for _ in self.parts]
        for at, node in self._own_ops():
            ops[at].append((node.op, node.outputs))
        for part, done in zip(self.parts, ops, strict=True):
            yield general(part.module), tuple(done)

    def _own_ops(self) -> Iterator[tuple[int, Node]]:
        """The ops of forward that belong to a segment, with its number."""
        at = 0
        for node in self.graph.with_role(Role.OP):
            while at + 1 < len(self.parts) and node.index >= self.parts[at + 1].start:
                at += 1
            is_forward = node.phase is Phase.FORWARD and not node.view
            if is_forward and not belongs_nowhere(self.graph, node):
                yield at, node

    def _kinds_of(self, groups: Sequence[range]) -> tuple[tuple[SegmentKind, ...], list[range]]:
        """The kinds, and the segments that are planned as stages."""
        self.work = [0.0] * len(self.parts)
        for at, node in self._own_ops():
            self.work[at] += flops(node, self.graph)
        if len(groups) <= self.policy.segments_stages:
            planned = [group[: self.policy.segments_of_kind] for group in groups]
            pairs = zip(groups, planned, strict=True)
            return tuple(
                SegmentKind(len(g), k, 1 / len(p)) for k, (g, p) in enumerate(pairs)
            ), planned
        total, so_far = sum(self.work), 0.0
        bundles: dict[int, list[range]] = {}
        for group in groups:
            bundles.setdefault(int(so_far / total * self.policy.segments_stages), []).append(group)
            so_far += sum(self.work[k] for k in group)
        planned = [range(bundle[0].start, bundle[-1].stop) for bundle in bundles.values()]
        done = [sum(self.work[k] for k in part) for part in planned]
        return tuple(
            SegmentKind(len(g), k, self.work[g.start] / done[k])
            for k, bundle in enumerate(bundles.values())
            for g in bundle
        ), planned

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that several segments use, with the numbers of these segments."""
        readers = forward_readers(self.graph, [part.start for part in self.parts[1:]])
        users = {
            node.target: tuple(sorted(readers.get(node.index, ())))
            for node in self.graph.with_role(Role.PARAM)
        }
        return {name: numbers for name, numbers in users.items() if len(numbers) > 1}

    @cached_property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Those of the `shared` weights that are trained."""
        trained = {node.target for node in self.graph.with_role(Role.GRAD)}
        return {name: numbers for name, numbers in self.shared.items() if name in trained}

    def often(self, stage: int) -> float:
        """How many times the time of a stage all segments of its kinds take."""
        return sum(kind.count * kind.share for kind in self.kinds if kind.stage == stage)

    def least_often(self, stage: int, actions: PipelineSchedule) -> float:
        """How many times the time of `stage`, for all microbatches, a step takes at least: its
        segments are shared evenly by ranks. What the stage does once a step must be little beside
        that."""
        ranks = len(actions.rows)
        once = ranks / actions.num_stages / actions.microbatches
        return self.often(stage) * ((1 - once) / ranks + once)


def _can_begin(graph: Graph, start: int) -> bool:
    """Whether a stage can begin at an op."""
    try:
        in_stages(graph, [start])
    except StageError:
        return False
    return True
