"""Which pipelines are tried: on how many ranks, in how many microbatches, in the order of which
schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster.parts import add_up_to, has_parts, sizes_of_parts
from autopar.cost_model.memory import launched_ns
from autopar.driver.search.finding import Finding
from autopar.driver.search.open_counts import possible_counts
from autopar.driver.search.segments import segments
from autopar.errors import StageError
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.pipeline_orders import IN_CHUNKS, STAGES_PER_RANK, has_order, make_schedule
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import GraphRequest

_WAITING_LESS = ("eager-1f1b", "gpipe", "zb-h1", "zb-v")

_TABLE = "table"
"""The kind of a schedule that the user has written."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline but for its cuts: on how many ranks, with how many stages each, in how many
    microbatches, in the order of which schedule, or of a table by its `rows`. Ranks share the
    devices evenly, or have one of so many devices each, if there are `sizes`."""

    ranks: int
    microbatches: int
    schedule: str
    chunks: int = 1
    rows: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def actions(self) -> PipelineSchedule:
        """What its ranks do. StageError if there is no such table."""
        if self.rows:
            return PipelineSchedule.parse("\n".join(self.rows))
        return make_schedule(self.schedule, self.ranks, self.microbatches, self.chunks)

    @property
    def stored(self) -> str:
        """The schedule as a plan has it."""
        return f"{self.schedule}:{self.chunks}" if self.schedule in IN_CHUNKS else self.schedule

    @property
    def name(self) -> str:
        """What a candidate of the search is called."""
        return f"{self} ({self.stored})"

    def __str__(self) -> str:
        stages = self.actions.num_stages
        each = "" if stages == self.ranks else f" on {self.ranks} ranks"
        sizes = f" of {' or '.join(map(str, self.sizes))} devices" if self.sizes else ""
        return f"{stages} stages{each}{sizes}, {self.microbatches} microbatches"


class PipelineShapes:
    """The pipelines that are admitted by what is asked."""

    def __init__(self, graph_request: GraphRequest) -> None:
        self.graph_request = graph_request
        self.options, self.cluster = graph_request.options, graph_request.cluster

    def shaped(self, ranks: int, microbatches: int) -> PipelineShape:
        """The pipeline on so many ranks that is asked for. Of a table the first microbatches are
        done, if there are no more. Ranks that cannot share the devices evenly differ in how many
        they have."""
        options = self.options
        is_uneven = self.cluster.num_devices % ranks > 0 and not options.rank_meshes
        sizes = sizes_of_parts(self.cluster, ranks) if is_uneven else ()
        if options.actions is not None:
            table = options.actions.first(microbatches)
            rows = tuple(str(table).splitlines())
            return PipelineShape(ranks, microbatches, _TABLE, rows=rows, sizes=sizes)
        return PipelineShape(ranks, microbatches, *_order(options), sizes=sizes)

    def mixed(self, best: PipelineShape, idle: float) -> Sequence[PipelineShape]:
        """The shapes whose ranks may differ in how many devices they have, in order of their
        number, that are tried beside the `best` whose ranks do not, if these are `idle` for such a
        part of the time that the busiest works: that is all that can be won."""
        options, cluster = self.options, self.cluster
        is_open = options.is_mesh_open and not options.imposed
        if best.sizes or best.ranks == 1 or idle < options.policy.mixed_idle or not is_open:
            return []
        sizes = sizes_of_parts(cluster, best.ranks)
        numbers = [best.ranks]
        if options.stages is None and not options.cuts and options.actions is None:
            most = len(segments(self.graph_request.graph)) // best.chunks
            numbers = [*range(2, min(most, cluster.num_devices) + 1)]
        return [
            replace(self.shaped(ranks, best.microbatches), sizes=sizes)
            for ranks in numbers
            if _can_differ(cluster.num_devices, ranks, sizes)
            and has_order(best.schedule, ranks, best.microbatches)
        ]

    def numbers_of_ranks(self) -> Sequence[int]:
        """The numbers of ranks that pipelines may have. StageError if they cannot have the number
        that is asked for."""
        options, devices = self.options, self.cluster.num_devices
        if options.actions is not None:
            return [self._sharing(len(options.actions.rows))]
        name, chunks = _order(options)
        each = STAGES_PER_RANK.get(name, chunks)
        stages = len(options.cuts) + 1 if options.cuts else options.stages
        if stages is None and options.rank_meshes:
            return [self._sharing(len(options.rank_meshes))]
        if stages is None:
            most = len(segments(self.graph_request.graph)) // each
            shared = [n for n in range(2, min(most, devices) + 1) if devices % n == 0]
            return [n for n in shared if has_parts(self.cluster, devices // n)]
        if stages % each:
            raise StageError(f"{stages} stages are not {each} on each rank")
        return [self._sharing(stages // each)]

    def start(self, ranks: Sequence[int]) -> int:
        """The place of the number of `ranks` that is considered first: a node's devices each, if
        there may be."""
        nodes = self.cluster.levels[0].size
        return ranks.index(nodes) if nodes in ranks else len(ranks) // 2

    def _sharing(self, ranks: int) -> int:
        devices, meshes = self.cluster.num_devices, self.options.rank_meshes
        if meshes and len(meshes) != ranks:
            raise StageError(
                f"mesh {self.options.mesh!r} is of {len(meshes)} ranks, and {ranks} are asked for"
            )
        if devices % ranks and not meshes:
            if not self.options.is_mesh_open:
                raise StageError(
                    f"{devices} devices are not shared evenly by {ranks} ranks: they differ in "
                    "their meshes, so give each its own, as in 2x2/2/2, or none"
                )
            if not add_up_to(devices, ranks, sizes_of_parts(self.cluster, ranks)):
                raise StageError(
                    f"{devices} devices are not shared by {ranks} ranks in parts that lie evenly"
                )
        return ranks

    def numbers_of_microbatches(self, ranks: int) -> Sequence[int]:
        """The numbers of microbatches that are tried: of those that divide the batch, as many as
        there are ranks and more, as long as that is better; with a table the most that it has."""
        if self.options.microbatches is not None:
            return (self.options.microbatches,)
        possible = possible_counts(self.graph_request.graph)
        if self.options.actions is not None:
            return [n for n in possible if n <= self.options.actions.microbatches][-1:]
        name, _ = _order(self.options)
        ordered = [n for n in possible if has_order(name, ranks, n)] or possible
        return [n for n in ordered if n >= ranks] or ordered[-1:]

    def on_ranks(self, ranks: int) -> Sequence[PipelineShape]:
        """The shapes of so many ranks, few microbatches first."""
        return [self.shaped(ranks, count) for count in self.numbers_of_microbatches(ranks)]

    def first(self, shapes: Sequence[PipelineShape], known: Finding | None) -> int:
        """The place of the one that is considered first of `shapes` on as many ranks, where `known`
        is the best so far."""
        ranks = shapes[0].ranks
        least, most = self.options.policy.microbatches_per_rank, self._most_launched(ranks, known)
        enough = (k for k, shape in enumerate(shapes) if shape.microbatches >= least * ranks)
        first = next(enough, len(shapes) - 1)
        while first and most is not None and shapes[first].microbatches > most:
            first -= 1
        return first

    def _most_launched(self, ranks: int, known: Finding | None) -> float | None:
        """In how many microbatches ranks launch what they do in a small part of the step in one
        stage that is `known`."""
        if known is None or len(known.stages) > 1:
            return None
        once_ns = launched_ns(known.estimates.stages[0], self.cluster.device) / known.microbatches
        return self.options.policy.launched_most * known.step_ns * ranks / max(1.0, once_ns)


def other_orders(options: Options, best: PipelineShape, waits: float) -> Iterator[PipelineShape]:
    """The orders that are tried beside that of the `best` pipeline so far, whose busiest rank waits
    for such a part of the step: with as many stages, if their number or the cuts are given."""
    if options.schedule != "auto":
        return
    ranks, count = best.ranks, best.microbatches
    is_open = options.stages is None and not options.cuts
    if is_open:
        yield PipelineShape(ranks, count, "interleaved", 2)
    if waits >= options.policy.reordered_waits:
        for name in _WAITING_LESS:
            if is_open or name not in STAGES_PER_RANK:
                yield PipelineShape(ranks, count, name)


def _can_differ(devices: int, ranks: int, sizes: Sequence[int]) -> bool:
    """Whether so many ranks can have all devices where each has one of `sizes`, and not all the
    same."""
    others = (size for size in sizes if size * ranks != devices)
    return any(add_up_to(devices - size, ranks - 1, sizes) for size in others)


def _order(options: Options) -> tuple[str, int]:
    """The schedule, and the stages on each rank if as many as one likes are."""
    name, _, chunks = options.schedule.partition(":")
    name = "1f1b" if name == "auto" else name
    return name, int(chunks or 2) if name in IN_CHUNKS else 1


def imposed_on(options: Options) -> Iterator[str]:
    """What is asked of the pipeline, as a plan records it."""
    if options.cuts:
        yield f"cuts {', '.join(options.cuts)}"
    elif options.stages is not None:
        yield f"stages {options.stages}"
    if options.schedule != "auto":
        yield "schedule " + (options.schedule if options.actions is None else _TABLE)
