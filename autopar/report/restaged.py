"""What two plans decide otherwise of microbatches and stages."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plans.plan import Plan, Structure
from autopar.report.changes import Change, Topic, single
from autopar.report.decided import decision_topics


def stage_topics(old: Plan, new: Plan) -> Iterator[Topic]:
    """Topics on the pipeline, and on each of its stages where there are as many; on microbatches
    and chunks of losses where neither plan is one."""
    a, b = old.structure, new.structure
    chunks = single("chunks of losses", _chunks(a), _chunks(b))
    if not (a.stages or b.stages):
        counts = (str(each.schedule.microbatches) for each in (a, b))
        yield Topic("microbatches", "decision", (*single("microbatches", *counts), *chunks))
        return
    alike = len(a.stages) == len(b.stages)
    changes = (
        *single("schedule", _schedule(a), _schedule(b)),
        *_rows(a, b),
        *single("stages begin with", _starts(a), _starts(b)),
        *single("first devices", _firsts(a), _firsts(b)),
        # Where there are as many, each stage says so of itself.
        *(() if alike else single("meshes of stages", _meshes(a), _meshes(b))),
        *chunks,
    )
    yield Topic("pipeline", "decision", changes)
    if alike:
        for k, pair in enumerate(zip(old.stages, new.stages, strict=True)):
            for topic in decision_topics(*pair):
                yield Topic(f"stage {k}: {topic.title}", topic.cause, topic.changes)


def _chunks(structure: Structure) -> str:
    return str(max(part.schedule.loss_chunks for part in structure.parts))


def _schedule(structure: Structure) -> str:
    order = structure.schedule
    return f"{order.name} of {order.microbatches} microbatches"


def _rows(a: Structure, b: Structure) -> Iterator[Change]:
    """What ranks do otherwise by the tables of two plans that have them for as many ranks."""
    old, new = a.schedule.table, b.schedule.table
    if len(old) == len(new):
        for rank, pair in enumerate(zip(old, new, strict=True)):
            yield from single(f"actions of rank {rank}", *pair)


def _starts(structure: Structure) -> str:
    return ", ".join(stage.start or "(first)" for stage in structure.stages)


def _firsts(structure: Structure) -> str:
    return ", ".join(str(stage.first_rank) for stage in structure.stages)


def _meshes(structure: Structure) -> str:
    return ", ".join(part.mesh.text or "one device" for part in structure.parts)
