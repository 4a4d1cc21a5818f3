"""What two plans decide otherwise of what they both have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TypeVar

from autopar.plans.matching import general
from autopar.plans.plan import Plan, Structure
from autopar.report.changes import ChangeItem, Topic, folded, gathered, single
from autopar.report.names import maker, op_place, tensor_place
from autopar.report.placed import choice_text, param_text, route_text, sharding_text

AS_MADE = "as it is made"
STAYS = "stays"

_Entry = TypeVar("_Entry", str, tuple[str, ...])


def decision_topics(old: Plan, new: Plan) -> tuple[Topic, ...]:
    """Topics whose cause is the planner; some may be empty. What is decided of ops and parameters
    that only one plan has is not among them."""
    a, b = old.structure, new.structure
    return tuple(
        Topic(title, "decision", changes)
        for title, changes in (
            ("mesh", single("mesh", a.mesh.text, b.mesh.text)),
            ("parameters", folded(_params(a, b))),
            ("ops", gathered(_ops(old, new))),
            (
                "activations saved for backward",
                gathered(
                    _tensors(
                        (a.saved, b.saved), old, new,
                        lambda text, s: sharding_text(text, s.mesh) if text else AS_MADE,
                    )
                ),
            ),
            (
                "redistribution of tensors",
                gathered(
                    _tensors(
                        (a.routes, b.routes), old, new,
                        lambda arcs, s: route_text(arcs, s.mesh) if arcs else STAYS,
                    )
                ),
            ),
            (
                "outputs",
                gathered(
                    _tensors(
                        (a.outputs, b.outputs), old, new,
                        lambda text, s: sharding_text(text, s.mesh) if text else "",
                    )
                ),
            ),
        )
    )  # fmt: skip


def _params(a: Structure, b: Structure) -> Iterator[ChangeItem]:
    for name, old in a.params.items():
        new = b.params.get(name)
        if new is not None and (old.storage, old.kept) != (new.storage, new.kept):
            before, after = param_text(old, a.mesh), param_text(new, b.mesh)
            yield ChangeItem("", name, before, after, prod(old.shape))


def _ops(old: Plan, new: Plan) -> Iterator[ChangeItem]:
    a, b = old.structure, new.structure
    for key, choice in a.ops.items():
        if key in b.ops and b.ops[key] != choice:
            place, name = op_place(key)
            before, after = choice_text(choice, a.mesh), choice_text(b.ops[key], b.mesh)
            yield ChangeItem(place, name, before, after, _weight(key, old, new))


def _tensors(
    tables: tuple[Mapping[str, _Entry], Mapping[str, _Entry]],
    old: Plan,
    new: Plan,
    text: Callable[[_Entry | None, Structure], str],
) -> Iterator[ChangeItem]:
    """Entries that differ, of tensors that both plans have."""
    first, second = tables
    both = _shared(old, new)
    for key in {**first, **second}:
        before, after = first.get(key), second.get(key)
        if before != after and both(key):
            place, name = tensor_place(key)
            weight = _weight(maker(key, old.structure.ops) or key.partition("@")[0], old, new)
            texts = text(before, old.structure), text(after, new.structure)
            yield ChangeItem(place, name, *texts, weight)


def _shared(old: Plan, new: Plan) -> Callable[[str], bool]:
    """Whether the key of a tensor is of something that is not in one plan alone."""
    patterns = [{general(name) for name in plan.structure.params} for plan in (old, new)]

    def shared(key: str) -> bool:
        makers = [maker(key, plan.structure.ops) for plan in (old, new)]
        kind, _, target = key.partition("@")[0].partition(":")
        if kind == "param" and not any(makers):
            return (target in patterns[0]) == (target in patterns[1])
        return bool(makers[0]) == bool(makers[1])

    return shared


def _weight(key: str, old: Plan, new: Plan) -> int:
    totals = (plan.estimates.ops.get(key) for plan in (old, new))
    return max((t.compute_ns + t.communication_ns for t in totals if t), default=0)
