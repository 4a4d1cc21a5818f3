"""What two plans decide otherwise of microbatches and stages."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plans.plan import Plan
from autopar.plans.structure import Structure
from autopar.report.changes import Change, Topic, single
from autopar.report.decided import decision_topics


def stage_topics(old: Plan, new: Plan) -> Iterator[Topic]:
    """Topics whose cause is the planner; some may be empty: on each stage where there are as many,
    and on how they work together."""
    a, b = old.structure, new.structure
    alike = len(a.stages) == len(b.stages)
    if alike:
        for k, pair in enumerate(zip(old.stages, new.stages, strict=True)):
            for topic in decision_topics(*pair):
                which = f"stage {k}: " if len(a.stages) > 1 else ""
                yield Topic(f"{which}{topic.title}", topic.cause, topic.changes)
    counts = (str(each.microbatches) for each in (a, b))
    chunks = (str(each.loss_chunks) for each in (a, b))
    changes = (
        *single("schedule", a.schedule, b.schedule),
        *single("microbatches", *counts),
        *_rows(a, b),
        *single("stages begin with", _starts(a), _starts(b)),
        *single("first devices", _firsts(a), _firsts(b)),
        # Where there are as many, each stage says so of itself.
        *(() if alike else single("meshes of stages", _meshes(a), _meshes(b))),
        *single("chunks of losses", *chunks),
    )
    yield Topic("pipeline", "decision", changes)


def _rows(a: Structure, b: Structure) -> Iterator[Change]:
    """What ranks do otherwise by the tables of two plans that have them for as many ranks."""
    old, new = a.table, b.table
    if len(old) == len(new):
        for rank, pair in enumerate(zip(old, new, strict=True)):
            yield from single(f"actions of rank {rank}", *pair)


def _starts(structure: Structure) -> str:
    return ", ".join(stage.start or "(first)" for stage in structure.stages)


def _firsts(structure: Structure) -> str:
    return ", ".join(str(stage.first_rank) for stage in structure.stages)


def _meshes(structure: Structure) -> str:
    return ", ".join(stage.mesh.text or "one device" for stage in structure.stages)
