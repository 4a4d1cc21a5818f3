"""Decisions in which two plans differ: on what both have, and on microbatches and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

from autopar.ir.mesh import Mesh
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.requests.matching import general
from autopar.plans.structure import Param, Stage, Structure
from autopar.report.changes import ChangeItem, Topic, folded, gathered, single
from autopar.report.names import maker, op_place, tensor_place
from autopar.report.placed import choice_text, param_text, route_text, sharding_text

AS_COMPUTED = "as computed"
STAYS = "stays"
_RECOMPUTED, _NOT_RECOMPUTED = "recomputed", "saved, if it is read"
_ON_HOST, _ON_DEVICE = "in the host's memory", "on the device, if it is saved"

_Entry = TypeVar("_Entry", str, tuple[str, ...])


def decision_topics(old: StagePlan, new: StagePlan) -> tuple[Topic, ...]:
    """Topics whose cause is the planner; some may be empty. They have no ops and parameters that
    only one plan has."""
    a, b = old.structure, new.structure
    saved = _tensors((a.saved, b.saved), old, new, sharding_text, AS_COMPUTED)
    moved = _tensors((a.routes, b.routes), old, new, route_text, STAYS)
    returned = _tensors((a.outputs, b.outputs), old, new, sharding_text, "")
    return tuple(
        Topic(title, "decision", changes)
        for title, changes in (
            ("mesh", single("mesh", a.mesh.text, b.mesh.text)),
            ("parameters", folded(_params(a, b))),
            ("ops", gathered(_ops(old, new))),
            ("activations saved for backward", gathered(saved)),
            (
                "recomputed in backward",
                gathered(_listed(a.recompute, b.recompute, _RECOMPUTED, _NOT_RECOMPUTED)),
            ),
            (
                "offloaded until backward",
                gathered(_listed(a.offloaded, b.offloaded, _ON_HOST, _ON_DEVICE)),
            ),
            ("redistribution of tensors", gathered(moved)),
            ("outputs", gathered(returned)),
        )
    )


def _params(a: Stage, b: Stage) -> Iterator[ChangeItem]:
    for name, old in a.params.items():
        new = b.params.get(name)
        if new is not None and _place(old) != _place(new):
            before, after = param_text(old, a.mesh), param_text(new, b.mesh)
            yield ChangeItem("", name, before, after, prod(old.shape))


def _place(param: Param) -> tuple[str, str, str]:
    return param.storage, param.for_backward, param.residency


def _ops(old: StagePlan, new: StagePlan) -> Iterator[ChangeItem]:
    a, b = old.structure, new.structure
    for key, choice in a.ops.items():
        if key in b.ops and b.ops[key] != choice:
            place, name = op_place(key)
            before, after = choice_text(choice, a.mesh), choice_text(b.ops[key], b.mesh)
            yield ChangeItem(place, name, before, after, _weight(key, old, new))


def _listed(
    a: Sequence[str], b: Sequence[str], listed: str, not_listed: str
) -> Iterator[ChangeItem]:
    """Keys that one plan lists and the other does not, in words."""
    for key in sorted({*a} ^ {*b}):
        place, name = op_place(key)
        before, after = (listed if key in some else not_listed for some in (a, b))
        yield ChangeItem(place, name, before, after, 0)


def _tensors(
    tables: tuple[Mapping[str, _Entry], Mapping[str, _Entry]],
    old: StagePlan,
    new: StagePlan,
    text: Callable[[_Entry, Mesh], str],
    without: str,
) -> Iterator[ChangeItem]:
    """Entries that differ, of tensors that both plans have; `without` stands for none."""
    first, second = tables
    both = _shared(old, new)
    for key in {**first, **second}:
        before, after = first.get(key), second.get(key)
        if before != after and both(key):
            place, name = tensor_place(key)
            weight = _weight(maker(key, old.structure.ops) or key.partition("@")[0], old, new)
            sides = (before, old.structure.mesh), (after, new.structure.mesh)
            was, now = (text(entry, mesh) if entry else without for entry, mesh in sides)
            yield ChangeItem(place, name, was, now, weight)


def _shared(old: StagePlan, new: StagePlan) -> Callable[[str], bool]:
    """A function of a tensor's key: whether both plans have what it is about, or neither."""
    patterns = [{general(name) for name in plan.structure.params} for plan in (old, new)]

    def shared(key: str) -> bool:
        makers = [maker(key, plan.structure.ops) for plan in (old, new)]
        kind, _, target = key.partition("@")[0].partition(":")
        if kind == "param" and not any(makers):
            return (target in patterns[0]) == (target in patterns[1])
        return bool(makers[0]) == bool(makers[1])

    return shared


def _weight(key: str, old: StagePlan, new: StagePlan) -> int:
    totals = (plan.estimates.ops.get(key) for plan in (old, new))
    return max((t.compute_ns + t.communication_ns for t in totals if t), default=0)


# Decisions on microbatches and stages.


def stage_topics(old: Plan, new: Plan) -> Iterator[Topic]:
    """Topics whose cause is the planner; some may be empty: on each stage where there are as many,
    and on how they work together."""
    a, b = old.structure, new.structure
    if len(a.stages) == len(b.stages):
        for k, pair in enumerate(zip(old.stages, new.stages, strict=True)):
            for topic in decision_topics(*pair):
                which = f"stage {k}: " if len(a.stages) > 1 else ""
                yield Topic(f"{which}{topic.title}", topic.cause, topic.changes)
    before, after = dict(_pipeline_texts(a, b)), dict(_pipeline_texts(b, a))
    changes = (change for what in before for change in single(what, before[what], after[what]))
    yield Topic("pipeline", "decision", tuple(changes))


def _pipeline_texts(own: Structure, other: Structure) -> Iterator[tuple[str, str]]:
    """How the stages of a plan work together, as far as it is to be compared with the other's."""
    stages = own.stages
    yield "schedule", own.schedule
    yield "microbatches", str(own.microbatches)
    if len(own.schedule_rows) == len(other.schedule_rows):
        yield from ((f"actions of rank {k}", row) for k, row in enumerate(own.schedule_rows))
    yield "stages begin with", ", ".join(stage.start or "(first)" for stage in stages)
    yield "first devices", ", ".join(str(stage.first_rank) for stage in stages)
    # With equally many stages, topics of each stage have its mesh.
    if len(stages) != len(other.stages):
        yield "meshes of stages", ", ".join(stage.mesh.text or "one device" for stage in stages)
    yield "chunks of losses", str(own.loss_chunks)
