"""Which pipelines are tried: on how many ranks, in how many microbatches, in the order of which
schedule."""

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


def shaped(graph_request: GraphRequest, ranks: int, microbatches: int) -> PipelineShape:
    """The pipeline on so many ranks that is asked for. Of a table the first microbatches are done,
    if there are no more. Ranks that cannot share the devices evenly differ in how many they
    have."""
    options = graph_request.options
    is_uneven = graph_request.cluster.num_devices % ranks > 0 and not options.rank_meshes
    sizes = sizes_of_parts(graph_request.cluster, ranks) if is_uneven else ()
    if options.actions is not None:
        table = options.actions.first(microbatches)
        rows = tuple(str(table).splitlines())
        return PipelineShape(ranks, microbatches, _TABLE, rows=rows, sizes=sizes)
    return PipelineShape(ranks, microbatches, *_order(options), sizes=sizes)


def mixed_shapes(
    graph_request: GraphRequest, best: PipelineShape, idle: float
) -> Sequence[PipelineShape]:
    """The shapes whose ranks may differ in how many devices they have, in order of their number,
    that are tried beside the `best` whose ranks do not, if these are `idle` for such a part of the
    time that the busiest works: that is all that can be won."""
    options, cluster = graph_request.options, graph_request.cluster
    is_open = options.is_mesh_open and not options.imposed
    if best.sizes or best.ranks == 1 or idle < options.policy.mixed_idle or not is_open:
        return []
    sizes = sizes_of_parts(cluster, best.ranks)
    numbers = [best.ranks]
    if options.stages is None and not options.cuts and options.actions is None:
        most = len(segments(graph_request.graph)) // best.chunks
        numbers = [*range(2, min(most, cluster.num_devices) + 1)]
    return [
        replace(shaped(graph_request, ranks, best.microbatches), sizes=sizes)
        for ranks in numbers
        if _can_differ(cluster.num_devices, ranks, sizes)
        and has_order(best.schedule, ranks, best.microbatches)
    ]


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


def numbers_of_ranks(graph_request: GraphRequest) -> Sequence[int]:
    """The numbers of ranks that pipelines may have. StageError if they cannot have the number that
    is asked for."""
    options, devices = graph_request.options, graph_request.cluster.num_devices
    if options.actions is not None:
        return [_sharing(graph_request, len(options.actions.rows))]
    name, chunks = _order(options)
    each = STAGES_PER_RANK.get(name, chunks)
    stages = len(options.cuts) + 1 if options.cuts else options.stages
    if stages is None and options.rank_meshes:
        return [_sharing(graph_request, len(options.rank_meshes))]
    if stages is None:
        most = len(segments(graph_request.graph)) // each
        shared = [n for n in range(2, min(most, devices) + 1) if devices % n == 0]
        return [n for n in shared if has_parts(graph_request.cluster, devices // n)]
    if stages % each:
        raise StageError(f"{stages} stages are not {each} on each rank")
    return [_sharing(graph_request, stages // each)]


def _sharing(graph_request: GraphRequest, ranks: int) -> int:
    devices, meshes = graph_request.cluster.num_devices, graph_request.options.rank_meshes
    if meshes and len(meshes) != ranks:
        raise StageError(
            f"mesh {graph_request.options.mesh!r} is of {len(meshes)} ranks, and {ranks} are asked "
            "for"
        )
    if devices % ranks and not meshes:
        if not graph_request.options.is_mesh_open:
            raise StageError(
                f"{devices} devices are not shared evenly by {ranks} ranks: they differ in their "
                "meshes, so give each its own, as in 2x2/2/2, or none"
            )
        if not add_up_to(devices, ranks, sizes_of_parts(graph_request.cluster, ranks)):
            raise StageError(
                f"{devices} devices are not shared by {ranks} ranks in parts that lie evenly"
            )
    return ranks


def numbers_of_microbatches(graph_request: GraphRequest, ranks: int) -> Sequence[int]:
    """The numbers of microbatches that are tried: of those that divide the batch, as many as there
    are ranks and more, as long as that is better; with a table the most that it has."""
    if graph_request.options.microbatches is not None:
        return (graph_request.options.microbatches,)
    possible = possible_counts(graph_request.graph)
    if graph_request.options.actions is not None:
        return [n for n in possible if n <= graph_request.options.actions.microbatches][-1:]
    name, _ = _order(graph_request.options)
    ordered = [n for n in possible if has_order(name, ranks, n)] or possible
    return [n for n in ordered if n >= ranks] or ordered[-1:]


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
