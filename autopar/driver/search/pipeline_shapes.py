"""Which pipelines are tried: numbers of ranks and of microbatches, and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster.parts import add_up_to, has_parts, sizes_of_parts
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
    """A pipeline but for its cuts: the number of ranks, the stages on each, the number of
    microbatches, and the schedule, or a table by its `rows`. Ranks share the devices evenly; with
    `sizes`, each has one of these numbers of devices."""

    ranks: int
    microbatches: int
    schedule: str
    chunks: int = 1
    rows: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def actions(self) -> PipelineSchedule:
        """The pipeline schedule. StageError if there is none for this shape."""
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
    """The pipelines that a request admits."""

    def __init__(self, graph_request: GraphRequest) -> None:
        self.graph_request = graph_request
        self.options, self.cluster = graph_request.options, graph_request.cluster

    def shaped(self, ranks: int, microbatches: int) -> PipelineShape:
        """The pipeline of a request on so many ranks. A table that has more microbatches is cut
        after the first of them. If ranks cannot share the devices evenly, they differ in their
        number of devices."""
        options = self.options
        is_uneven = self.cluster.num_devices % ranks > 0 and not options.rank_meshes
        sizes = sizes_of_parts(self.cluster, ranks) if is_uneven else ()
        if options.actions is not None:
            table = options.actions.first(microbatches)
            rows = tuple(str(table).splitlines())
            return PipelineShape(ranks, microbatches, _TABLE, rows=rows, sizes=sizes)
        return PipelineShape(ranks, microbatches, *_order(options), sizes=sizes)

    def mixed(self, best: PipelineShape, idle: float) -> Sequence[PipelineShape]:
        """The shapes to try whose ranks may differ in their number of devices, in order of the
        number of ranks, beside the `best` of equal ranks. `idle` is the part of the busiest rank's
        work for which ranks idle, and so the most that can be won."""
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
        """The numbers of ranks that pipelines may have. StageError if the requested number is
        impossible."""
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
        """The place of the number of `ranks` to try first: one node's devices each, if possible."""
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
        """The numbers of microbatches to try: those that divide the batch, from the number of ranks
        on. With a table, the most that it has."""
        if self.options.microbatches is not None:
            return (self.options.microbatches,)
        possible = [*possible_counts(self.graph_request.graph, self.cluster.num_devices // ranks)]
        if self.options.actions is not None:
            return [n for n in possible if n <= self.options.actions.microbatches][-1:]
        name, _ = _order(self.options)
        ordered = [n for n in possible if has_order(name, ranks, n)] or possible
        return [n for n in ordered if n >= ranks] or ordered[-1:]

    def on_ranks(self, ranks: int) -> Sequence[PipelineShape]:
        """The shapes of so many ranks, few microbatches first."""
        return [self.shaped(ranks, count) for count in self.numbers_of_microbatches(ranks)]

    def first(self, shapes: Sequence[PipelineShape]) -> int:
        """The place of the shape to try first, of `shapes` on as many ranks."""
        least = self.options.policy.microbatches_per_rank * shapes[0].ranks
        enough = (k for k, shape in enumerate(shapes) if shape.microbatches >= least)
        return next(enough, len(shapes) - 1)


def other_orders(options: Options, best: PipelineShape, waits: float) -> Iterator[PipelineShape]:
    """The orders to try beside that of the `best` pipeline so far, whose busiest rank waits for the
    part `waits` of the step. They have as many stages, if their number or the cuts are given."""
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
    """Whether so many ranks can have all devices if each has one of `sizes`, and not all the
    same."""
    others = (size for size in sizes if size * ranks != devices)
    return any(add_up_to(devices - size, ranks - 1, sizes) for size in others)


def _order(options: Options) -> tuple[str, int]:
    """The schedule, and the stages on each rank if their number is free."""
    name, _, chunks = options.schedule.partition(":")
    name = "1f1b" if name == "auto" else name
    return name, int(chunks or 2) if name in IN_CHUNKS else 1


def imposed_on(options: Options) -> Iterator[str]:
    """The pipeline options, as a plan records them."""
    if options.cuts:
        yield f"cuts {', '.join(options.cuts)}"
    elif options.stages is not None:
        yield f"stages {options.stages}"
    if options.schedule != "auto":
        yield "schedule " + (options.schedule if options.actions is None else _TABLE)
