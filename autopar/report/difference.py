"""What is different between two plans: the content of `autopar diff`.

Topics are changes of the model, of the request, or of decisions. A decision that changed with the
model is no surprise, one that changed without a cause is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.plans.plan import Plan
from autopar.plans.provenance import FRAGILE
from autopar.report.cautions import doubt
from autopar.report.changes import Cause, Topic
from autopar.report.cost_comparison import MEMORY, STAGES, TIME, Figure, compare_costs
from autopar.report.decided import stage_topics
from autopar.report.requested import FINGERPRINT, have_ops_of_model, model_topics, request_topics


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two plans, in short."""

    digest: str
    model: str
    cluster: str
    mesh: str
    step_ns: int
    exposed_communication_ns: int
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """`topics` has the differences, none of them empty, and `costs` all figures. `notes` are
    sentences on what is never compared and may be the reason: versions, proofs, what was
    imposed."""

    old: Side
    new: Side
    topics: tuple[Topic, ...]
    costs: tuple[Figure, ...]
    notes: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether anything differs, whether it counts or not."""
        return bool(self.topics) or any(figure.is_changed for figure in self.costs)

    def cost_rows(self) -> list[Figure]:
        """The figures worth a row: times and memory, of stages too, if any figure changed, others
        that changed."""
        if not any(figure.is_changed for figure in self.costs):
            return []
        return [
            figure
            for figure in self.costs
            if figure.is_changed
            or (figure.section in (TIME, MEMORY, STAGES) and (figure.before or figure.after))
        ]

    def with_cause(self, cause: Cause) -> tuple[Topic, ...]:
        return tuple(topic for topic in self.topics if topic.cause == cause)


def compare(old: Plan, new: Plan) -> Difference:
    """What is different in `new`."""
    every = (*model_topics(old, new), *request_topics(old, new), *stage_topics(old, new))
    topics = tuple(topic for topic in every if topic.changes)
    return Difference(
        old=_side(old),
        new=_side(new),
        topics=topics,
        costs=compare_costs(old, new),
        notes=(*_unseen(old, new, topics), *_notes(old, new)),
    )


def _side(plan: Plan) -> Side:
    structure, estimates = plan.structure, plan.estimates
    return Side(
        digest=plan.digest,
        model=structure.model,
        cluster=structure.cluster,
        mesh=structure.mesh_text,
        step_ns=estimates.step_ns,
        exposed_communication_ns=estimates.exposed_communication_ns,
        memory_bytes=estimates.memory.total,
        memory_limit_bytes=estimates.memory_limit,
    )


def _unseen(old: Plan, new: Plan, topics: Sequence[Topic]) -> Iterator[str]:
    """A note on a graph that is another one although nothing else of the model differs."""
    if not have_ops_of_model(old, new):
        return
    if [t.title for t in topics if t.cause == "model"] == [FINGERPRINT]:
        yield (
            "the graph is another one, though its ops and parameters are the same: an argument of "
            "an op, a view, or the order of inputs or of the modules' definitions changed"
        )


def _notes(old: Plan, new: Plan) -> Iterator[str]:
    a, b = old.provenance, new.provenance
    for what in ("autopar", "torch", "solver"):
        before, after = getattr(a, what), getattr(b, what)
        if before != after:
            yield f"planned with {what} {before or '?'} before, {after or '?'} now"
    yield from (f"imposed before: {line}" for line in a.imposed if line not in b.imposed)
    yield from (f"imposed now: {line}" for line in b.imposed if line not in a.imposed)
    for which, provenance in (("old", a), ("new", b)):
        if not provenance.is_close:
            yield f"the {which} plan is not proven optimal: {doubt(provenance)}"
        if provenance.is_fragile:
            yield f"the {which} plan is fragile: one of another structure is within {FRAGILE:.1%}"
